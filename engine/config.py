"""`[engine]`: everything an operator can decide about one engine process.

Values found at run time (number of blocks, the model's own context length) live in MemoryPlan and
ModelFacts, never here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from engine.speculation_config import LOOKUPS, SpeculationConfig
from kernels.config import KernelsConfig
from kernels.ranks.shares import MOST_RANKS, Degrees
from runtime.config import load_section, problem_with_adapter_name
from runtime.errors import ConfigError
from runtime.models import own_model
from runtime.resources import num_cores

MOST_RANK, MOST_SLOTS = 64, 256


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.scheduler]`: what one step may contain, and who comes first."""

    # Tokens computed in one step, over all sequences.
    max_num_batched_tokens: int = 1024
    # Sequences that hold KV blocks at the same time.
    max_num_seqs: int = 64
    # A prompt with more tokens left to compute than this is long.
    long_prefill_tokens: int = 512
    # Largest part of a step that long prompts may take together while anyone else has work.
    long_prefill_share: float = 0.5
    # A step that computes prompts is as long as those who are answered in it can bear. Answers of a tier with
    # tpot_target_ms keep that pace: prompts get what they are ahead of it, and no gap is planned to be longer
    # than three targets. Beside other answers of its own tenant, a prompt's step takes up to this time, or
    # twice that of the answers in it where this is longer. 0 sets no time, neither for neighbours.
    step_target_ms: float = 1000.0
    # The same beside other tenants' answers without a target, and where several tenants asked within a
    # second; longer where prompts would be computed at less than three quarters of their best rate. 0 makes
    # no difference between tenants.
    neighbour_step_ms: float = 75.0
    # After so many preemptions a sequence keeps its batch slot until it ends.
    max_preemptions: int = 3
    # Part of the blocks that admission leaves free, so that running sequences can grow.
    watermark: float = 0.02
    # Tenants whose weighted service differs by less than this compete by deadline, in tokens.
    fairness_band_tokens: int = 2048
    # Price of a generated token in prompt tokens, for fairness between tenants.
    output_token_cost: float = 2.0
    # A request that has waited longer than this is aged ...
    aging_s: float = 20.0
    # ... and one of so many admissions goes to the oldest aged request, whatever its tier.
    aging_interval: int = 8
    # Requests that may wait at the same time; further ones are refused with a retry delay.
    max_waiting: int = 4096
    # Refuse a request whose expected wait exceeds its tier's queue limit.
    refuse_early: bool = True
    # Plan the next step while the present one runs; "auto" does so on an accelerator. On CPUs it takes part
    # of a core from the step that runs, and gains nothing (table drafters of docs/benchmarks-tables.md). "on"
    # goes with drafts that are looked up for an accelerator: others wait for a step's tokens.
    overlap: Literal["auto", "on", "off"] = "auto"


KvDtype = Literal["auto", "bfloat16", "float32", "int8", "fp8", "kivi4"]


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.cache]`: the paged KV cache."""

    # Tokens per block.
    block_size: int = 16
    # Size of the cache; 0 takes `memory_fraction` of what weights and workspace leave.
    kv_cache_bytes: int = 0
    # Part of the device's memory that the engine may use.
    memory_fraction: float = 0.85
    # Element type of keys and values; "auto" is the model's. kivi4 is four bits: keys by channel, in blocks
    # of 64 tokens (block_size), values by token; each sequence has its newest keys whole beside.
    kv_dtype: KvDtype = "auto"
    # That of layers that have another one, by their numbers from 0: {"0-1" = "int8", "29" = "auto"}. Layers
    # differ in what four bits cost them (`python -m benchmarks.kv_layers`). What drafts has `kv_dtype` alone.
    kv_dtype_layers: dict[str, KvDtype] = {}
    prefix_caching: bool = True
    # Host memory for KV blocks of preempted sequences and evicted prefixes; 0 turns the tier off.
    host_bytes: int = 0
    # Memory for the forgotten keys of answers that have a bound on what they lose (`kv.max_lost`): on a CPU a
    # part of the plan, else the host's. 0 refuses such bounds.
    forgotten_bytes: int = 0
    # Folder of a scorer, by which answers of `kv.policy` kvzap choose what they keep of their prompts: what
    # `millrace train-kvzap` wrote, or a KVzapModel of kvpress. Empty: kvzap/ in the model's folder, if it is
    # there; else the policy is refused.
    kvzap: str = ""
    # Speed of copies from the host. A block is brought back when that is faster than computing it again.
    host_bytes_per_s: float = 8e9
    # Folder for blocks of keys and values that outlive the engine; engines of the same machine may share it.
    # Empty turns it off.
    disk_path: str = ""
    # What the folder may hold, of all models together. What was not used for longest makes room.
    disk_bytes: int = 16 << 30
    # Speed of reads from the disk. A block is read when that is faster than computing it again.
    disk_bytes_per_s: float = 1e9
    # File with a key of 32 or more characters, by which blocks are encrypted on disk; empty: they are plain.
    disk_key_file: str = ""

    @property
    def shares_full_blocks_alone(self) -> bool:
        """Whether none but its own sequence can go on with a block that is not full: of some layers its keys
        are elsewhere until then.
        """
        return "kivi4" in (self.kv_dtype, *self.kv_dtype_layers.values())


class SimulatedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.simulation]`: speed and size of the engine without weights."""

    # Duration of a step before its tokens, in milliseconds; 0 is instantaneous.
    step_ms: float = 0.0
    # Tokens computed per second on top of step_ms; 0 is unlimited.
    tokens_per_s: float = 0.0
    vocab_size: int = 32_000
    # Tokens are drawn from [first_token_id, last_token_id), cut to the vocabulary.
    first_token_id: int = 300
    last_token_id: int = 1000
    max_model_len: int = 32_768
    num_blocks: int = 4096
    # For drills: every step that computes a prompt with this token fails. -1 is no token.
    poison_token_id: int = -1
    # For drills: the runner breaks for good when it meets a prompt with this token.
    break_token_id: int = -1


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.quantization]`: details of `engine.quantize`."""

    # Inputs that share a scale in int4 weights; a layer whose inputs do not fall into such groups takes the
    # next smaller size, or stays dense.
    group_size: Literal[32, 64, 128] = 64
    # The head (logits): int8 per output, or in the serving type.
    head: Literal["int8", "dense"] = "int8"
    # How w8a8 balances channels with outliers: by ranges seen in a calibration run at load, or not at all.
    smoothing: Literal["calibrated", "off"] = "calibrated"


class PackedWeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.packed_weights]`: what the native kernels multiply by, kept on disk as it was packed, so that
    the next start of the same model reads it. `millrace models packed` shows and clears it.
    """

    # Folder, which engines of the same machine may share; empty is `packed` in the cache folder.
    path: str = ""
    # What the folder may hold, of all models together; 0 keeps and reads nothing. What was not used for
    # longest makes room.
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 32 << 30
    # A model that takes less is packed again each time. That is quick; the import of torch before it is not,
    # and takes most of a small model's start.
    min_bytes: Annotated[int, msgspec.Meta(ge=0)] = 4 << 20

    def validate(self) -> None:
        """Raises ConfigError."""
        if self.path and not Path(self.path).is_absolute():
            raise ConfigError(
                f"engine.packed_weights.path = {self.path!r}: must be an absolute path, the same for all "
                "engines that share it"
            )


class PeakConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.peak]`: what the device can do, for metrics of the share reached. 0 is the data sheet's of
    GPUs that are known by name, and else unknown: then no share is reported.
    """

    # Dense operations in the serving type.
    tflops: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    # Reads of the device's memory.
    gbytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class AdaptersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.adapters]`: low-rank adapters (LoRA) that are served beside the model, in PEFT's format."""

    # Name to folder, as engines see it. Folders of the checkpoint's folder `adapters` need not be named here.
    # More can be added while the engine runs, if there are slots.
    paths: dict[str, str] = {}
    # Adapters that are in memory, and compute, at the same time: the others take turns. 0 is one for each of
    # `paths`, up to 8; so none without any.
    slots: int = 0
    # Largest rank; memory is kept for it.
    max_rank: int = 16

    @property
    def num_slots(self) -> int:
        """Slots that there really are."""
        return self.slots or min(len(self.paths), 8)

    def validate(self) -> None:
        """Raises ConfigError."""
        if not 1 <= self.max_rank <= MOST_RANK:
            raise ConfigError(f"engine.adapters.max_rank = {self.max_rank}: must be in [1, {MOST_RANK}]")
        if not 0 <= self.slots <= MOST_SLOTS:
            raise ConfigError(f"engine.adapters.slots = {self.slots}: must be in [0, {MOST_SLOTS}]")
        for name in self.paths:
            problem = problem_with_adapter_name(name)
            if problem:
                raise ConfigError(f"engine.adapters.paths: {problem}")


class GraphsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.graphs]`: decode steps of a GPU that are captured once and replayed."""

    # "auto" captures where model and attention back end allow it.
    decode: Literal["auto", "off"] = "auto"
    # Numbers of rows that are captured; a step takes the next larger one. Empty is 1, 2, 4, 8, 16, 24, ... up
    # to scheduler.max_num_seqs.
    rows: tuple[int, ...] = ()


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.vllm]`: an engine whose core is vLLM's (make = "vllm"), in an environment of its own."""

    # Interpreter of the environment that has vLLM; empty is the one that `millrace engine install vllm` made.
    python: str = ""
    # Ranks that share each layer, ranks that follow one another, and whole copies of the model; the product
    # is the number of devices.
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    pipeline_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    # Experts are spread over the ranks, whole.
    expert_parallel: bool = False
    # Launcher of the ranks: "mp" on one machine, "ray" on several; empty is vLLM's own choice.
    launcher: Literal["", "mp", "ray"] = ""
    # Tokens per KV block; 0 is vLLM's own choice (128 on a CPU).
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Leaves out torch.compile and CUDA graphs: ready sooner, slower afterwards.
    eager: bool = False
    # Further arguments of vLLM's AsyncEngineArgs by name, as they are.
    options: dict[str, Any] = {}
    # Variables of the core's process.
    environment: dict[str, str] = {}
    # Serve with a version of vLLM that was not tried.
    any_version: bool = False


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.parallel]`: processes of this machine, ranks, that compute one model together."""

    # Ranks that share each layer. Each has its part of the weights, of the heads' keys and values, and of
    # engine.num_threads. It divides the heads and the inner elements of the model.
    tensor: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    # Groups of ranks over which the experts of each layer are spread, whole; it divides their number. There
    # are as many ranks as the larger of both says, which the other one divides. Equal to `tensor`, the ranks
    # that share all else have some experts each. Above it, all else is computed by several ranks alike: with
    # tensor = 1 answers have one process's bits. Below it, the ranks of a group share each of its experts.
    expert: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    # Stages one behind another, each with a run of the layers and as many ranks as both above say. Answers
    # have the bits that these alone give.
    pipeline: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1

    @property
    def degrees(self) -> Degrees:
        """How the model is shared."""
        return Degrees(tensor=self.tensor, expert=self.expert, pipeline=self.pipeline)

    @property
    def asked(self) -> str:
        """The setting that asks for ranks."""
        name = self.degrees.first_above_one
        return f"engine.parallel.{name} = {getattr(self, name)}"


class HandOverConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.hand_over]`: prompts that one engine computes and another one answers; see engine.role."""

    # How long an engine holds the blocks of a prompt for another one, in seconds, whatever happens to that.
    hold_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    # What is left of a prompt is computed here when the other engine has been silent for so long, in seconds.
    silence_limit_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine]`."""

    listen: str = "127.0.0.1:50071"
    # Address of the Prometheus endpoint; empty turns it off.
    metrics_listen: str = ""
    # Label that gateways route by (tiers.<name>.pool, gateway.routing.long_lane); "" is none.
    pool: str = ""
    # What gateways ask of it: "prefill" computes prompts, whose blocks "decode" engines pull and go on with;
    # "both" does all by itself. Gateways decide for each request; none is lost where one kind is missing.
    role: Literal["both", "prefill", "decode"] = "both"
    # Make of the core that computes: this suite's own, or vLLM's (see [engine.vllm]).
    make: Literal["millrace", "vllm"] = "millrace"
    # Serve deterministic tokens without weights.
    simulated: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # Products of float32 on a CPU, in torch's words: "highest" keeps all 24 bits of a number, "high" may keep
    # 16 (two bfloat16 each, where the processor has AMX tiles: several times as fast). "auto" is "high" for
    # models that pool, whose embeddings stay within 1e-9 of cosine 1, and "highest" for those that generate.
    float32_matmul_precision: Literal["auto", "highest", "high"] = "auto"
    # Quantize dense weights at load: int8 (weights alone), w8a8 (inputs of products, too), int4 (by groups),
    # or fp8 (inputs of products, too; for GPUs).
    # Checkpoints that are quantized already are served as they are.
    quantize: Literal["off", "int8", "w8a8", "int4", "fp8"] = "off"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Kernels in C++ on a CPU. "auto" uses them where they can be built and know the model, "required" refuses
    # to serve otherwise, "off" leaves all to torch.
    native: Literal["auto", "off", "required"] = "auto"
    # Name of an attention back end; "auto" takes the fastest that the machine supports.
    attention_backend: str = "auto"
    # Longest prompt plus completion, in tokens; 0 is the model's own limit.
    max_model_len: int = 0
    # Threads of the forward; 0 is OMP_NUM_THREADS, else one for each core that the process (its
    # container) may use.
    num_threads: int = 0
    # Time that running requests get to finish after SIGTERM.
    drain_limit_s: float = 30.0
    # Steps a gateway may be behind before its stream is ended.
    max_stream_backlog: int = 4096
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    packed_weights: PackedWeightsConfig = PackedWeightsConfig()
    kernels: KernelsConfig = KernelsConfig()
    graphs: GraphsConfig = GraphsConfig()
    peak: PeakConfig = PeakConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    simulation: SimulatedConfig = SimulatedConfig()
    parallel: ParallelConfig = ParallelConfig()
    hand_over: HandOverConfig = HandOverConfig()
    vllm: VllmConfig = VllmConfig()

    def validate(self) -> None:
        """Raises ConfigError naming the first key whose value cannot work, its limit and the remedy."""
        self._check_counts()
        if self.make == "vllm":
            self._check_vllm()
        if self.parallel.degrees.size > 1:
            self._check_ranks()
        scheduler, cache = self.scheduler, self.cache
        for key, fraction in (
            ("scheduler.long_prefill_share", scheduler.long_prefill_share),
            ("cache.memory_fraction", cache.memory_fraction),
        ):
            if not 0 < fraction <= 1:
                raise ConfigError(f"engine.{key} = {fraction}: must be above 0 and at most 1")
        if not 0 <= scheduler.watermark < 0.5:
            raise ConfigError(f"engine.scheduler.watermark = {scheduler.watermark}: must be in [0, 0.5)")
        if scheduler.max_num_seqs > scheduler.max_num_batched_tokens:
            raise ConfigError(
                f"engine.scheduler.max_num_seqs = {scheduler.max_num_seqs} exceeds max_num_batched_tokens = "
                f"{scheduler.max_num_batched_tokens}: every running sequence needs one token per step; "
                "lower the former or raise the latter"
            )
        if any(rows < 1 for rows in self.graphs.rows):
            raise ConfigError(f"engine.graphs.rows = {list(self.graphs.rows)}: each must be at least 1")
        if cache.host_bytes and not cache.prefix_caching:
            raise ConfigError(
                "engine.cache.host_bytes: host memory holds prefixes; set prefix_caching = true, "
                "or host_bytes = 0"
            )
        self._check_disk()
        self._check_role()
        self.adapters.validate()
        self.speculation.validate()
        self.check_overlap("none" if self.simulated else self.device)
        self.packed_weights.validate()
        simulation = self.simulation
        if not 0 <= simulation.first_token_id < min(simulation.last_token_id, simulation.vocab_size):
            raise ConfigError(
                f"engine.simulation.first_token_id = {simulation.first_token_id}: must be below "
                f"last_token_id = {simulation.last_token_id} and vocab_size = {simulation.vocab_size}"
            )

    def overlaps(self, device: str) -> bool:
        """Whether the next step is planned while the present one runs. Drafts wait for a step's tokens; only
        looked-up ones go on behind what a device is still drawing.
        """
        asked, on_device = self.scheduler.overlap, device not in ("cpu", "none")
        waits = self.speculation.method not in ("off", *(LOOKUPS if on_device else ()))
        return not waits and (asked == "on" or (asked == "auto" and on_device))

    def check_overlap(self, device: str) -> None:
        """Raises ConfigError where overlap is asked for, and drafts wait for the tokens of each step."""
        if self.scheduler.overlap == "on" and not self.overlaps(device):
            raise ConfigError(
                f'engine.scheduler.overlap = "on": drafts of engine.speculation.method = '
                f"{self.speculation.method!r} wait for each step's tokens; set it to auto, or the method "
                "to off (ngram and suffix go with it on a GPU)"
            )

    def _check_disk(self) -> None:
        cache = self.cache
        if not cache.disk_path:
            if cache.disk_key_file:
                raise ConfigError(
                    "engine.cache.disk_key_file: nothing is written without engine.cache.disk_path; set "
                    "both, or neither"
                )
            return
        if not Path(cache.disk_path).is_absolute():
            raise ConfigError(
                f"engine.cache.disk_path = {cache.disk_path!r}: must be an absolute path, the same for all "
                "engines that share it"
            )
        for is_missing, needed in (
            (not cache.prefix_caching, "prefix_caching = true: what is on disk are prefixes"),
            (self.simulated, "simulated = false: a simulated engine has no keys and values"),
        ):
            if is_missing:
                raise ConfigError(f'engine.cache.disk_path: set {needed}; or disk_path = ""')

    def _check_role(self) -> None:
        """Whoever hands prompts over has blocks that another engine can use."""
        if self.role == "both":
            return
        for key, is_set, remedy in (
            ("make", self.make == "vllm", "set engine.vllm.options.kv_transfer_config"),
            ("simulated", self.simulated, "a simulated engine has no keys and values; set it to false"),
            ("parallel", self.parallel.degrees.size > 1, "each rank has a part of a block; leave it out"),
            ("cache.prefix_caching", not self.cache.prefix_caching, "what is handed over are prefixes"),
        ):
            if is_set:
                both = 'or set engine.role = "both"'
                raise ConfigError(
                    f"engine.{key}: does not go with engine.role = {self.role!r}; {remedy}, {both}"
                )

    def _check_vllm(self) -> None:
        """Nothing that was asked of this suite's own core is ignored in silence by another one."""
        theirs = "engine.vllm.options"
        for key, is_set, remedy in (
            ("simulated", self.simulated, 'a simulated engine has no make: set make = "millrace"'),
            ("quantize", self.quantize != "off", f"set {theirs}.quantization, in vLLM's terms"),
            ("speculation.method", self.speculation.method != "off", f"set {theirs}.speculative_config"),
            ("cache.host_bytes", self.cache.host_bytes, f"set {theirs}.kv_transfer_config"),
            ("cache.disk_path", self.cache.disk_path, f"set {theirs}.kv_transfer_config"),
            ("cache.forgotten_bytes", self.cache.forgotten_bytes, "set it to 0: its answers forget nothing"),
            ("cache.kvzap", self.cache.kvzap, 'set it to "": its answers forget nothing'),
            ("cache.kv_dtype", self.cache.kv_dtype != "auto", f"set {theirs}.kv_cache_dtype"),
            (
                "cache.kv_dtype_layers",
                bool(self.cache.kv_dtype_layers),
                f"set {theirs}.kv_cache_dtype_skip_layers",
            ),
        ):
            if is_set:
                raise ConfigError(f'engine.{key}: not known to make = "vllm"; {remedy}')

    def _check_ranks(self) -> None:
        """What is asked for beside ranks works with them, or is refused."""
        device = 'set it to cpu or auto, or make = "vllm" with engine.vllm.tensor_parallel_size'
        degrees = self.parallel.degrees
        if degrees.stage_size % degrees.tensor or degrees.stage_size % degrees.expert:
            raise ConfigError(
                f"engine.parallel.expert = {degrees.expert}: neither divides engine.parallel.tensor = "
                f"{degrees.tensor} nor is a multiple of it; set it to 1 or {degrees.tensor}"
            )
        if degrees.size > MOST_RANKS:
            raise ConfigError(
                f"engine.parallel.pipeline = {degrees.pipeline}: its stages of {degrees.stage_size} are "
                f"{degrees.size} ranks, and there are {MOST_RANKS} at most; lower it"
            )
        for key, is_set, remedy in (
            ("make", self.make == "vllm", "its ranks are engine.vllm.tensor_parallel_size; set that"),
            ("simulated", self.simulated, "a simulated engine has no weights; set all degrees to 1"),
            ("device", self.device == "cuda", device),
            ("native", self.native == "off", "ranks compute by the native kernels; set it to auto"),
            ("quantize", self.quantize not in ("off", "int8", "int4"), "set it to int8, int4 or off"),
            (
                "speculation.method",
                self.speculation.method not in ("off", *LOOKUPS),
                "set it to ngram, suffix or off, whose drafts need no further weights",
            ),
            ("cache.host_bytes", bool(self.cache.host_bytes), "set it to 0"),
            ("cache.disk_path", bool(self.cache.disk_path), 'set it to ""'),
            ("cache.forgotten_bytes", bool(self.cache.forgotten_bytes), "set it to 0"),
            ("cache.kvzap", bool(self.cache.kvzap), 'set it to ""'),
        ):
            if is_set:
                raise ConfigError(f"engine.{key}: does not go with {self.parallel.asked}; {remedy}")

    def _check_counts(self) -> None:
        for limit, complaint, keys in (
            (1, "must be at least 1", _AT_LEAST_ONE),
            (0, "must not be negative", _NOT_NEGATIVE),
        ):
            for key in keys:
                value = attrgetter(key)(self)
                if value < limit:
                    raise ConfigError(f"engine.{key} = {value}: {complaint}")


_AT_LEAST_ONE = (
    "scheduler.max_num_batched_tokens",
    "scheduler.max_num_seqs",
    "scheduler.long_prefill_tokens",
    "scheduler.max_preemptions",
    "scheduler.fairness_band_tokens",
    "scheduler.aging_interval",
    "scheduler.max_waiting",
    "cache.block_size",
    "cache.host_bytes_per_s",
    "cache.disk_bytes",
    "cache.disk_bytes_per_s",
    "simulation.num_blocks",
    "simulation.max_model_len",
    "speculation.num_draft_tokens",
    "speculation.head_context_tokens",
    "speculation.answer_tokens",
    "speculation.lookahead_window",
    "speculation.lookahead_candidates",
    "max_stream_backlog",
)
_NOT_NEGATIVE = (
    "cache.kv_cache_bytes",
    "cache.host_bytes",
    "cache.forgotten_bytes",
    "scheduler.step_target_ms",
    "scheduler.neighbour_step_ms",
    "max_model_len",
    "num_threads",
    "drain_limit_s",
    "simulation.step_ms",
    "simulation.tokens_per_s",
)


def load(tables: Mapping[str, Any]) -> EngineConfig:
    """`[engine]`, checked, with the model's adapters and those that lie beside it; raises ConfigError naming
    the key at fault.
    """
    config = load_section(tables, "engine", EngineConfig)
    model = own_model(tables)
    found = {name: each.path for name, each in model.adapters.items()}
    found = adapters_beside(model.path) | found
    if found:
        paths = found | config.adapters.paths
        config = replace(config, adapters=replace(config.adapters, paths=paths))
    config.validate()
    return config


def adapters_beside(model: str) -> dict[str, str]:
    """Adapters that came with a checkpoint: folders of its folder `adapters`, by their names."""
    found = sorted(Path(model).glob("adapters/*/adapter_config.json"))
    return {path.parent.name: str(path.parent) for path in found}


def num_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Threads that compute where the configuration does not say: OMP_NUM_THREADS where somebody has set it,
    else one for each core.
    """
    asked = environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else num_cores()
