"""The memory plan: where the bytes go, computed from headers before anything is loaded. No torch.

The same function serves start-up, admission and `millrace plan` (`python -m engine.model.plan_command
--config FILE [--json]`).

    total = weights + adapters + workspace + headroom + KV cache + states (+ what is left unused)

Before loading, weights and workspace are predicted. On a GPU both are then measured (runner/cuda/build), and
the plan is made again with the numbers found.

- weights: every tensor of the checkpoint in the serving type or as it is quantized (weight_memory.py), and
  the tables of rotary angles; on a CPU a scorer of keys and values (`engine.cache.kvzap`), too.
- adapters: slots of the largest rank (adapter_memory.py).
- workspace: the largest activations of a step of max_num_batched_tokens tokens, and the logits of
  max_num_seqs rows.
- headroom: 5 % of the total, for the allocator and the process itself.
- KV cache: `engine.cache.kv_cache_bytes`, or what the above leave of `memory_fraction`. On a CPU the default
  is modest, so that a laptop stays usable: at most a quarter of the free memory, at most
  CPU_CACHE_LIMIT_BYTES, and at least one sequence of max_model_len.
- states: a part of the cache's bytes, where layers carry a state from token to token (state_memory.py).
- window blocks: another part, where only some layers have a window (window_memory.py).
- forgotten keys: `engine.cache.forgotten_bytes`, on a CPU; beside a GPU they lie in the host's memory.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from checkpoint.files import find, is_gguf
from engine.config import EngineConfig
from engine.model.adapter_memory import adapter_bytes
from engine.model.checkpoint import read_headers
from engine.model.draft_heads import draft_config
from engine.model.draft_tree import branch_shape, check_tree
from engine.model.eagle3 import HeadRooms, check_head, read_head_spec
from engine.model.families import read_spec
from engine.model.kv_memory import (
    check_channels,
    check_forgotten_bytes,
    check_kv_dtype,
    forgotten_block_bytes,
    kv_bytes_per_token,
    kv_dtypes_of,
    num_texts_of,
    own_key_bytes,
    piece_bytes,
    recent_bytes,
    remembers_because,
)
from engine.model.kv_scorer import scorer_bytes
from engine.model.layer_spec import MedusaSpec
from engine.model.lookahead import LOOKAHEAD, check_lookahead
from engine.model.medusa import check_medusa, medusa_bytes, read_medusa_spec
from engine.model.mtp import MTP, check_predictor, read_predictor_spec, read_trained_predictor
from engine.model.rank_checks import check_ranks
from engine.model.rank_memory import moving_bytes, shared_bytes
from engine.model.shards import WHOLE, Shard
from engine.model.spec import ModelSpec, TensorHeader
from engine.model.state_memory import StateRoom, check_draft_states, draft_states_bytes, of_stages, state_room
from engine.model.weight_memory import (
    WeightCount,
    WeightForm,
    count_weights,
    layer_bytes,
    quantizes_head,
    weight_forms,
)
from engine.model.window_memory import WindowRoom, window_room
from engine.types import MemoryPlan
from kernels.linear.packed import FLOAT12_LEVELS
from kernels.native.library import likely_level
from runtime.config import ModelConfig
from runtime.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_CACHE_LIMIT_BYTES = 1 << 30
HEADROOM_FRACTION = 0.05
# On a CPU, models up to this size are served in float32: no slower there, and equal to the float32 oracle.
# The native kernels read bfloat16 at full speed, so there only what fits a cache is no slower.
FLOAT32_LIMIT_BYTES = 1 << 30
NATIVE_FLOAT32_LIMIT_BYTES = 64 << 20
# History that one attention step looks at, in tokens; bounds the size of its scores.
ATTENTION_CHUNK_TOKENS = 256
# Attention walks over histories in pieces that begin at multiples of this.
LARGEST_BLOCK = 64
# Methods of speculation by heads: what reads them, and what refuses those that do not go with a model.
_HEADS = {
    "eagle3": (read_head_spec, check_head),
    "medusa": (read_medusa_spec, check_medusa),
    MTP: (read_trained_predictor, check_predictor),
}


class DraftInput(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model: it adds its weights, and its keys and values to those of every token. Or a head, which
    has rooms for these.
    """

    folder: str
    spec: ModelSpec
    weights: WeightCount


class PlanInput(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan is made for."""

    spec: ModelSpec
    # "cpu" or "cuda".
    device: str
    # Free memory of the device, in bytes.
    available_bytes: int
    weights: WeightCount
    config: EngineConfig
    # The draft model of speculation, where there is one.
    draft: DraftInput | None = None
    # Of a scorer of keys and values, which lies in the host's memory.
    scorer_bytes: int = 0
    # What the weights are held as.
    forms: tuple[WeightForm, ...] = ()
    # What the model (its draft not counted) and the largest step were measured to take; 0 is not measured.
    measured_weights_bytes: int = 0
    measured_workspace_bytes: int = 0
    # The first of the ranks that share the model: all else here is one rank's.
    shard: Shard = WHOLE
    # The whole model, where that is shared, and its elements.
    whole_spec: ModelSpec | None = None
    whole_num_weights: int = 0
    # The same for the first rank of each stage of a pipeline.
    stages: tuple[PlanInput, ...] = ()

    @property
    def whole(self) -> ModelSpec:
        """The model, of which `spec` may be a part."""
        return self.whole_spec or self.spec

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return self.shard.size

    @property
    def head(self) -> ModelSpec | None:
        """What drafts, where that is a head and no model."""
        return None if self.draft is None or self.draft.spec.draft_head is None else self.draft.spec

    @property
    def has_draft_model(self) -> bool:
        """Whether a model drafts, upon blocks like the model's own."""
        return self.draft is not None and self.head is None

    @property
    def remembers_because(self) -> str:
        """Why answers may forget no blocks; empty where they may."""
        return remembers_because(self.whole, has_draft=self.has_draft_model)

    @property
    def num_weights(self) -> int:
        """Elements of the model."""
        return self.weights.num_weights

    @property
    def dtype(self) -> str:
        """Element type that the whole model is served in; quantized weights have their own."""
        whole = self.whole_num_weights or self.num_weights
        return choose_dtype(self.config, self.spec, self.device, whole)

    @property
    def kv_dtype(self) -> str:
        """Element type of keys and values of what drafts, and of layers that have no other one."""
        return self.dtype if self.config.cache.kv_dtype == "auto" else self.config.cache.kv_dtype

    @property
    def whole_kv_dtypes(self) -> tuple[str, ...]:
        """That of each layer of the whole model. Raises ConfigError for one that a layer cannot have."""
        return kv_dtypes_of(self.whole, self.config.cache, self.dtype)

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """That of each layer of `spec`. Raises ConfigError likewise."""
        return self.shard.of_layers(self.whole_kv_dtypes)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion: the model's own limit, or the lower one configured."""
        rope, asked = self.spec.ropes[0], self.config.max_model_len
        limit = rope.longest_positions
        if asked > limit:
            raise ConfigError(
                f"engine.max_model_len = {asked} exceeds the {limit} positions of {self.spec.architecture}; "
                "lower it"
            )
        if not self.spec.bidirectional:
            return asked or self.spec.max_positions
        # Texts are read in one step.
        most = self.config.scheduler.max_num_batched_tokens
        if asked > most:
            raise ConfigError(
                f"engine.max_model_len = {asked} exceeds engine.scheduler.max_num_batched_tokens = {most}, "
                f"and {self.spec.architecture} reads a text in one step; raise that, or lower the first"
            )
        return asked or min(self.spec.max_positions, most)


def choose_dtype(config: EngineConfig, spec: ModelSpec, device: str, num_weights: int) -> str:
    """The serving type. "auto" is the checkpoint's on an accelerator; on a CPU float32 for small models, else
    bfloat16. (float16 weights stay as they are where the native kernels multiply float16, and are rounded to
    bfloat16 elsewhere; activations are never float16.)
    """
    if config.dtype != "auto":
        return config.dtype
    if device != "cpu":
        return spec.dtype if spec.dtype in DTYPE_BYTES else "bfloat16"
    limit = FLOAT32_LIMIT_BYTES if config.native == "off" else NATIVE_FLOAT32_LIMIT_BYTES
    if spec.dtype == "float32" or num_weights * DTYPE_BYTES["float32"] <= limit:
        return "float32"
    return "bfloat16"


def weights_bytes(count: WeightCount, dtype: str, *, float12: bool = False) -> int:
    """Bytes of weights served in `dtype`; with `float12`, what is multiplied lies in 12 bits."""
    saved = count.num_multiplied // 2 if float12 else 0
    return count.num_plain * DTYPE_BYTES[dtype] - saved + count.fixed_bytes


def packs_float12(given: PlanInput) -> bool:
    """Whether bfloat16 weights lie in 12 bits: on CPUs whose kernels multiply them so (kernels/linear)."""
    native = given.device == "cpu" and given.config.native != "off" and given.dtype == "bfloat16"
    return native and likely_level() in FLOAT12_LEVELS


def packs_codes(config: EngineConfig, device: str) -> bool:
    """Whether weights in codes of a few bits, and in fp8, stay so: where the native kernels multiply."""
    return device == "cpu" and config.native != "off"


def workspace_bytes(given: PlanInput) -> int:
    """Largest simultaneous activations of one step."""
    spec, scheduler = given.spec, given.config.scheduler
    tokens, width = scheduler.max_num_batched_tokens, DTYPE_BYTES[given.dtype]
    intermediate = max(map(spec.intermediate_size_of, range(spec.num_layers)))
    if spec.experts:
        active = (
            spec.experts.num_active * spec.experts.intermediate_size + spec.experts.shared_intermediate_size
        )
        intermediate = intermediate + active if spec.experts.joins_dense else max(intermediate, active)
    # Residual, its norm and a half layer's output; gate and up, in the serving type and in float32 beside it.
    dense = tokens * (3 * spec.hidden_size * width + 2 * intermediate * (width + 8))
    if spec.per_layer is not None:
        # Rows of the second embedding, and what is added to them.
        dense += 2 * tokens * spec.num_layers * spec.per_layer.width * 4
    # Queries, scores of one chunk of history with their weights, and the weighted values, all float32.
    per_query = spec.num_heads * (2 * spec.query_key_dim + 2 * spec.value_dim + 2 * ATTENTION_CHUNK_TOKENS)
    attention = 0 if spec.is_keyless else tokens * per_query * 4
    # A layer with a state: its projection, what is convolved and what is scanned, all float32.
    state = spec.state
    if state is not None:
        values = state.num_heads * state.value_dim
        dense += tokens * 4 * (3 * state.channels + 3 * values)
    rows = max(16, num_logit_rows(given.config))
    # Logits, their probabilities, the random noise (float64) and one copy while masks are applied.
    sampling = 0 if spec.pooling is not None else rows * spec.vocab_size * (4 + 4 + 8 + 4)
    beside = _shared_bytes(given, num_logit_rows(given.config)) + _scratch_bytes(given)
    return max(dense + attention, sampling) + tokens * spec.hidden_size * 4 + beside


def _scratch_bytes(given: PlanInput) -> int:
    """Blocks in which branches of texts are computed, and keys of texts and branches that are whole."""
    branches, types = branch_shape(given.config), given.kv_dtypes
    num_texts, num_tokens = (
        num_texts_of(given.config, given.device),
        given.config.scheduler.max_num_batched_tokens,
    )
    own = own_key_bytes(given.spec, types, num_tokens)
    if not packs_codes(given.config, given.device):
        own += piece_bytes(given.spec, types, num_tokens)
    if branches is None:
        return own + recent_bytes(given.spec, types, num_texts)
    per_block = given.config.cache.block_size * kv_bytes_per_token(given.spec, types)
    newest = recent_bytes(given.spec, types, num_texts + branches.num_branches)
    return own + branches.num_scratch_blocks * per_block + newest


def _shared_bytes(given: PlanInput, rows: int) -> int:
    """What a rank has only because there are others."""
    if given.num_ranks == 1:
        return 0
    spec, degrees = given.spec, given.shard.degrees
    bytes_each = weights_bytes(given.weights, given.dtype) / max(1, given.num_weights)
    shared = shared_bytes(spec, degrees, given.config.scheduler.max_num_batched_tokens, rows)
    return shared + moving_bytes(spec, degrees, bytes_each)


def _tied_head_bytes(given: PlanInput, *, float12: bool) -> int:
    """A head that is a second copy of the embedding, in the layout of the matrix product or in codes."""
    spec = given.spec
    second_copy = spec.tied_embeddings and not quantizes_head(given.config) and spec.pooling is None
    packed = given.dtype == "float32" or given.config.native != "off"
    if not (second_copy and given.device == "cpu" and packed):
        return 0
    head = spec.vocab_size * spec.hidden_size
    dense = head * DTYPE_BYTES[given.dtype] - (head // 2 if float12 else 0)
    return (given.weights.tied_head_bytes or dense) // given.num_ranks


def num_logit_rows(config: EngineConfig) -> int:
    """Rows of one step whose logits are wanted at most: each sequence's last, and those of its drafts."""
    wanted = config.scheduler.max_num_seqs * (1 + config.speculation.num_draft_tokens)
    if (branches := branch_shape(config)) is not None:
        wanted += branches.num_logit_rows
    return min(wanted, config.scheduler.max_num_batched_tokens)


def make_plan(given: PlanInput) -> MemoryPlan:
    """The plan; where stages share the model, that of the fullest, since all have as many blocks, with as
    many states as fit into each. Raises ConfigError with the numbers when not even one sequence of
    max_model_len fits.
    """
    return plan_and_fullest(given)[0]


def plan_and_fullest(given: PlanInput) -> tuple[MemoryPlan, PlanInput]:
    """As `make_plan`; and the rank that has room for the fewest blocks."""
    ranks = given.stages or (given,)
    plans = [_plan_of_rank(rank) for rank in ranks]
    _, fullest = min(zip(plans, ranks, strict=True), key=lambda pair: pair[0].num_blocks)
    return of_stages(plans), fullest


def _plan_of_rank(given: PlanInput) -> MemoryPlan:
    """The plan of one rank, or of all that there is. A stage may have no layer that attends."""
    cache, spec = given.config.cache, given.spec
    _check_cache(given)
    rope_tables = sum(given.max_model_len * rope.rotary_dim * 4 for rope in spec.ropes)
    float12, workspace = packs_float12(given), workspace_bytes(given)
    weights = weights_bytes(given.weights, given.dtype, float12=float12) + rope_tables
    weights += _tied_head_bytes(given, float12=float12) + (given.scorer_bytes if given.device == "cpu" else 0)
    headroom = int(given.available_bytes * HEADROOM_FRACTION)
    per_token = kv_bytes_per_token(spec, given.kv_dtypes)
    adapters = adapter_bytes(spec, given.config.adapters, DTYPE_BYTES[given.dtype])
    if given.measured_weights_bytes:
        weights = given.measured_weights_bytes - adapters
    workspace = given.measured_workspace_bytes or workspace
    if given.draft is not None:
        weights += weights_bytes(given.draft.weights, given.dtype, float12=float12)
    if given.head is not None:
        workspace += _room_bytes(given, given.head)
    elif given.draft is not None:
        per_token += kv_bytes_per_token(given.draft.spec, given.kv_dtype)
        workspace += _draft_workspace(given, per_token)
    windows, sequence_blocks = window_room_of(given), -(-given.max_model_len // cache.block_size)
    in_windows = windows.bytes_per_token * cache.block_size
    per_block = per_token * cache.block_size - in_windows
    room = state_room(spec, given.config, per_token, is_keyless=given.whole.is_keyless)
    sequence_bytes = sequence_blocks * per_block + windows.least * in_windows
    least = sequence_bytes + room.least_bytes
    left = int(given.available_bytes * cache.memory_fraction) - weights - adapters - workspace - headroom
    left -= cache.forgotten_bytes if given.device == "cpu" else 0
    wanted = cache.kv_cache_bytes or left
    if spec.bidirectional:
        # No text keeps keys and values: there is room for those of a step, and of the one that is planned.
        wanted = 2 * per_block * (step_blocks(given.config) + sequence_blocks)
    elif not cache.kv_cache_bytes and given.device == "cpu":
        modest = min(CPU_CACHE_LIMIT_BYTES, given.available_bytes // 4)
        wanted = min(left, max(modest, sequence_bytes) + room.least_bytes)
    if cache.kv_cache_bytes > left >= least:
        raise ConfigError(_too_much(given, left))
    num_states = room.num_states(wanted - sequence_bytes)
    kept_bytes = wanted - num_states * room.bytes_per_state
    num_window_blocks = windows.num_blocks(kept_bytes, per_block, cache.block_size, sequence_blocks)
    fitting = (kept_bytes - num_window_blocks * in_windows) // max(1, per_block)
    num_blocks = room.num_blocks(fitting, given.config, num_states, sequence_blocks)
    # A draft model keeps the same blocks, in memory of its own.
    ids = windows.num_ids(kept_bytes, per_block, cache.block_size, sequence_blocks)
    num_ids, num_window_ids = (0, 0) if given.has_draft_model else ids
    if num_blocks < sequence_blocks or wanted > left:
        raise ConfigError(
            f"memory plan: {human(given.available_bytes)} available, weights {human(weights)}, slots for "
            f"adapters {human(adapters)}, workspace {human(workspace)}, headroom {human(headroom)}"
            f"{_forgotten(given)}, which "
            f"leaves {human(max(left, 0))} for the KV cache; {human(max(wanted, 0))} hold "
            f"{max(num_blocks, 0) * cache.block_size} tokens, but one "
            f"sequence of engine.max_model_len = {given.max_model_len} needs "
            f"{human(sequence_bytes)}{_beside(room)}; lower engine.max_model_len or "
            "engine.scheduler.max_num_batched_tokens, or raise engine.cache.kv_cache_bytes or memory_fraction"
        )
    return MemoryPlan(
        total_bytes=given.available_bytes,
        weights_bytes=weights,
        workspace_bytes=workspace,
        headroom_bytes=headroom,
        kv_cache_bytes=num_blocks * per_block + num_window_blocks * in_windows,
        kv_bytes_per_token=per_token,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        max_model_len=given.max_model_len,
        adapter_bytes=adapters,
        state_bytes=wanted - kept_bytes,
        num_states=num_states,
        state_interval=room.interval,
        window=windows.window,
        num_window_blocks=num_window_blocks,
        window_bytes_per_token=windows.bytes_per_token,
        num_block_ids=num_ids,
        num_window_block_ids=num_window_ids,
        forgotten_bytes=cache.forgotten_bytes,
        forgotten_block_bytes=forgotten_block_bytes(spec, cache.block_size),
    )


def _too_much(given: PlanInput, left: int) -> str:
    asked = given.config.cache.kv_cache_bytes
    return (
        f"engine.cache.kv_cache_bytes = {asked} ({human(asked)}) is more than the {human(left)} that are "
        f"left of {human(given.available_bytes)}; lower it, or set it to 0 to have it chosen"
    )


def _forgotten(given: PlanInput) -> str:
    size = given.config.cache.forgotten_bytes
    return f", forgotten keys {human(size)} (engine.cache.forgotten_bytes)" if size else ""


def _room_bytes(given: PlanInput, head: ModelSpec) -> int:
    """What a head keeps of sequences, or heads compute with."""
    if isinstance(head.draft_head, MedusaSpec):
        return medusa_bytes(head, given.config)
    return HeadRooms.of(head, given.config).num_bytes(head, given.config, given.kv_dtype)


def _check_cache(given: PlanInput) -> None:
    """Raises ConfigError for blocks, a type of a draft's keys and values, or memory for forgotten ones, that
    there cannot be.
    """
    size = given.config.cache.block_size
    if LARGEST_BLOCK % size:
        raise ConfigError(f"engine.cache.block_size = {size}: must be a power of two up to {LARGEST_BLOCK}")
    check_forgotten_bytes(given.spec, given.config.cache)
    drafts = () if given.draft is None else (given.kv_dtype,)
    check_channels(given.config, (*given.whole_kv_dtypes, *drafts))
    if given.draft is not None:
        check_kv_dtype(given.draft.spec, given.kv_dtype)


def window_room_of(given: PlanInput) -> WindowRoom:
    """What layers with a window need, where others have none."""
    sliding = kv_bytes_per_token(given.spec, given.kv_dtypes, given.spec.sliding_layers)
    return window_room(
        given.spec,
        given.config,
        device=given.device,
        max_model_len=given.max_model_len,
        bytes_per_token=sliding,
    )


def _beside(room: StateRoom) -> str:
    """What a cache must hold besides keys and values; empty where that is nothing."""
    if not room.bytes_per_state:
        return ""
    return (
        f" beside {human(room.least_bytes)} for {room.least} states of its layers without attention "
        "(engine.scheduler.max_num_seqs)"
    )


def step_blocks(config: EngineConfig) -> int:
    """Blocks that the texts of one step write to at most."""
    scheduler = config.scheduler
    return -(-scheduler.max_num_batched_tokens // config.cache.block_size) + scheduler.max_num_seqs


def _draft_workspace(given: PlanInput, per_token: int) -> int:
    """Bytes of the blocks and states in which a draft model runs ahead."""
    assert given.draft is not None, "it drafts"
    scratch = num_scratch_blocks(given.config) * given.config.cache.block_size * per_token
    newest = recent_bytes(given.draft.spec, given.kv_dtype, num_texts_of(given.config, given.device))
    return scratch + newest + draft_states_bytes(given.draft.spec, given.config)


def num_scratch_blocks(config: EngineConfig) -> int:
    """Blocks in which a draft model runs ahead of what is allocated."""
    per_sequence = -(-config.speculation.num_draft_tokens // config.cache.block_size) + 1
    return config.scheduler.max_num_seqs * per_sequence


def plan_input(config: EngineConfig, model: ModelConfig, *, device: str, available_bytes: int) -> PlanInput:
    """Reads a checkpoint's `config.json` and headers. Raises CheckpointError; ConfigError for what does not
    go with the model.
    """
    config.check_overlap(device)
    folder = find(model.path)
    spec = read_spec(folder)
    if config.quantize != "off" and spec.quantization is not None:
        raise ConfigError(
            f"engine.quantize = {config.quantize!r}: {folder} is quantized already "
            f"({spec.quantization.method}); set it to off, or give a dense checkpoint"
        )
    draft, method = None, config.speculation.method
    if method != "off":
        check_draft_states(f"engine.speculation.method = {method!r}", spec, device, "set it to off")
    if method == LOOKAHEAD:
        check_lookahead(spec, config, device)
    if config.speculation.tree:
        check_tree(spec, config, device)
    if method == MTP and not config.speculation.draft_model:
        draft = _prediction_input(config, spec, device, folder)
    elif method in ("draft_model", *_HEADS):
        draft = _draft_input(config, spec, device)
    headers, coded = _headers(spec, folder), packs_codes(config, device)
    given = PlanInput(
        draft=draft,
        spec=spec,
        device=device,
        available_bytes=available_bytes,
        weights=count_weights(spec, headers, config, coded=coded),
        forms=weight_forms(spec, headers, config, coded=coded),
        config=config,
    )
    taken = scorer_bytes(config.cache.kvzap, folder, spec, given.remembers_because)
    given = msgspec.structs.replace(given, scorer_bytes=taken)
    if config.parallel.degrees.size == 1:
        return given
    check_ranks(spec, config, folder, device, headers)
    return _of_ranks(given, headers, coded=coded)


def _of_ranks(given: PlanInput, headers: dict[str, TensorHeader], *, coded: bool) -> PlanInput:
    """What the plan of a model is made for, as it is for the first of the ranks that share it."""
    whole, config, degrees = given.spec, given.config, given.config.parallel.degrees
    sizes = layer_bytes(headers, whole.num_layers)
    stages = []
    for stage in range(degrees.pipeline):
        shard = Shard.of(whole, degrees.first_of(stage), degrees, sizes)
        spec, own = shard.model(whole), shard.headers(headers, whole)
        rank = msgspec.structs.replace(
            given,
            shard=shard,
            whole_spec=whole,
            whole_num_weights=given.num_weights,
            spec=spec,
            available_bytes=given.available_bytes // degrees.size,
            weights=count_weights(spec, own, config, coded=coded),
            forms=weight_forms(spec, own, config, coded=coded),
        )
        stages.append(rank)
    return msgspec.structs.replace(stages[0], stages=tuple(stages) if len(stages) > 1 else ())


def _draft_input(config: EngineConfig, spec: ModelSpec, device: str) -> DraftInput:
    path, method = config.speculation.draft_model, config.speculation.method
    folder = find(path, "engine.speculation.draft_model")
    if method in _HEADS:
        read, check = _HEADS[method]
        head = read(folder)
        headers = _headers(head, folder)
        check(head, headers, spec, config, device)
        return _counted(config, head, headers, device, folder)
    draft = read_spec(folder)
    field = f"engine.speculation.draft_model = {path!r}"
    check_draft_states(field, draft, device, "take one that only attends")
    if draft.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"engine.speculation.draft_model = {path!r} has {draft.vocab_size} tokens, but the model has "
            f"{spec.vocab_size}; take a draft of the same vocabulary"
        )
    return _counted(config, draft, _headers(draft, folder), device, folder)


def _prediction_input(config: EngineConfig, spec: ModelSpec, device: str, folder: Path) -> DraftInput:
    """The layer of the model's own checkpoint that predicts further tokens."""
    head = read_predictor_spec(spec)
    headers = _headers(head, folder)
    check_predictor(head, headers, spec, config, device)
    return _counted(config, head, headers, device, folder)


def _counted(
    config: EngineConfig, spec: ModelSpec, headers: dict[str, TensorHeader], device: str, folder: Path
) -> DraftInput:
    """What drafts."""
    asked = draft_config(config, spec)
    weights = count_weights(spec, headers, asked, coded=packs_codes(config, device))
    return DraftInput(folder=str(folder), spec=spec, weights=weights)


def _headers(spec: ModelSpec, folder: Path) -> dict[str, TensorHeader]:
    stored = read_headers(folder)
    return stored if is_gguf(folder) else spec.names.of(stored)


def human(num_bytes: int) -> str:
    """Bytes in binary units: 1536 is "1.5 KiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
