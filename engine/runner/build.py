"""Puts a runner together: plans the memory, loads the checkpoint, allocates the cache, chooses the executor.

No torch is imported here where the native kernels serve: another process loads for them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from checkpoint.files import find
from engine.adapters.build import make_store
from engine.adapters.store import AdapterStore
from engine.config import EngineConfig, num_threads
from engine.model.back_end import Load, Model, load_model, native_library
from engine.model.checkpoint import LoadRequest
from engine.model.device import choose_device
from engine.model.draft_heads import draft_config
from engine.model.draft_tree import DraftTree, branch_shape
from engine.model.eagle3 import MAX_READ_TOKENS, HeadRooms
from engine.model.eagle3_native import NativeDraftHead
from engine.model.kv_memory import num_slots
from engine.model.kv_scorer import find_scorer, unscored_because
from engine.model.layer_spec import MedusaSpec, PredictionSpec
from engine.model.loader import load_here, load_in_subprocess
from engine.model.lookahead import LOOKAHEAD, LookaheadShape
from engine.model.medusa_native import NativeMedusaHeads
from engine.model.mtp_native import NativePredictor
from engine.model.native_decoder import NativeDecoder
from engine.model.plan import DraftInput, PlanInput, make_plan, num_scratch_blocks, plan_input
from engine.model.state_memory import num_draft_states
from engine.model.work import work_of
from engine.runner.base import Progress
from engine.runner.executors.executor import Executor
from engine.runner.executors.native import NativeExecutor
from engine.runner.kv_storage import KvStorage
from engine.runner.ranks.adapters import RankedAdapters
from engine.runner.ranks.group import RankedStorage, RankGroup, of_a_rank
from engine.runner.runner import ModelRunner
from engine.runner.sequence_table import SequenceTable
from engine.runner.speculation.branches import BranchRoom
from engine.runner.speculation.draft_model import DraftModel
from engine.runner.speculation.drafter import Drafter
from engine.runner.speculation.head import HeadDrafter
from engine.runner.speculation.lookahead import LookaheadDrafter
from engine.runner.speculation.medusa import MedusaDrafter
from engine.runner.speculation.proposer import Proposer
from engine.sampling.grammar import GrammarEngine
from engine.types import MemoryPlan, ModelFacts
from kernels.host import HOST, Device
from kernels.native.library import NativeLibrary, load_native
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from runtime.memory import keep_freed_memory, one_heap

if TYPE_CHECKING:
    from engine.model.decoder import Decoder
    from kernels.attention.backends import AttentionBackend

_log = logging.getLogger(__name__)

# The cache's memory is had from the system for so many full steps ahead of its use.
_AHEAD_STEPS = 2


def build(
    config: EngineConfig,
    model: ModelConfig,
    progress: Progress,
    load: Load = load_in_subprocess,
    on_lost: Callable[[str], None] = _log.error,
    is_settled: Callable[[], bool] = lambda: True,
) -> tuple[ModelRunner, MemoryPlan, ModelFacts]:
    """The runner of the core process (see Builder). `load` is how weights come here that are packed for the
    native kernels: what loading takes is left in a process that ends with it. `on_lost` hears, in a thread,
    of a rank that is gone: no step succeeds after that. `is_settled`: whether steps alone read the weights.
    Raises ConfigError (CheckpointError) with one clear line.
    """
    if not config.num_threads:
        config = msgspec.structs.replace(config, num_threads=num_threads())
    device_name, available = choose_device(config)
    given = plan_input(config, model, device=device_name, available_bytes=available)
    plan = make_plan(given)
    spec = given.spec
    group = None
    if given.num_ranks > 1:
        group, config = RankGroup(given, plan, on_lost), of_a_rank(config)
    one_heap()
    keep_freed_memory()
    folder = find(model.path)
    scorer = find_scorer(config.cache.kvzap, folder, given.whole, given.remembers_because)
    request = LoadRequest(
        folder=folder,
        spec=spec,
        dtype=given.dtype,
        max_model_len=plan.max_model_len,
        config=config,
        shard=given.shard,
    )
    decoder, attention, device = _load(given, load, request, progress, group)
    adapters = _adapters(given, decoder, config, group)
    if device.type == "cuda":
        from engine.runner.cuda.build import measured_plan

        assert attention is not None
        progress("measure the largest step", 0.0)
        plan = measured_plan(given, cast("Decoder", decoder), attention)
    progress("allocate KV cache", 0.0)
    storage_options: dict[str, Any] = {
        "block_size": plan.block_size,
        "kv_dtype": given.kv_dtype,
        "device": device,
        "host_blocks": plan.num_host_blocks(config.cache.host_bytes),
    }
    storage = _storage(given, plan, storage_options | {"kv_dtype": given.kv_dtypes}, group)
    branches = branch_shape(config)
    storage.keep_newest_keys(num_slots(config) + (0 if branches is None else branches.num_branches))
    draft = _drafter(given, load, plan, decoder, storage_options, progress)
    progress("allocate KV cache", 1.0)
    grammar = GrammarEngine(folder, spec.vocab_size, spec.eos_token_ids)
    reading = grammar.read_ahead() if given.spec.pooling is None else None
    proposer = Proposer(config.speculation, draft)
    if device.type == "cuda":
        from engine.runner.cuda.build import make_device_runner

        assert attention is not None
        runner = make_device_runner(
            config,
            cast("Decoder", decoder),
            attention,
            storage=storage,
            grammar=grammar,
            proposer=proposer,
            native_sampling=config.native != "off",
            progress=progress,
        )
    else:
        runner = _host_runner(config, decoder, attention, storage, grammar, proposer)
    runner.adapters, runner.table.scorer = adapters, scorer
    runner.expert_balance = None if group is None else group.balance(decoder, is_settled)
    if reading is not None:
        # First steps are measured, and nothing else is to be computed meanwhile.
        reading.join()
    facts = _facts(given, plan, attention, device)
    return runner, plan, msgspec.structs.replace(facts, unscored_because=unscored_because(scorer))


def _adapters(given: PlanInput, model: Model, config: EngineConfig, group: RankGroup | None) -> AdapterStore:
    """The model's slots, in all its ranks. Raises AdapterError, behind which no rank stays."""
    if group is None:
        return make_store(model, config.adapters, dtype=given.dtype)
    try:
        make = functools.partial(RankedAdapters, group)
        return make_store(model, config.adapters, dtype=given.dtype, make=make)
    except BaseException:
        group.close()
        raise


def _storage(
    given: PlanInput, plan: MemoryPlan, options: dict[str, Any], group: RankGroup | None
) -> KvStorage:
    """The cache of the plan; blocks of several ranks move together."""
    branches = branch_shape(given.config)
    make_storage = KvStorage if group is None else functools.partial(RankedStorage, group)
    return make_storage(
        given.spec,
        num_blocks=plan.num_block_ids or plan.num_blocks,
        ahead_blocks=_AHEAD_STEPS * given.config.scheduler.max_num_batched_tokens // plan.block_size,
        num_states=plan.num_states,
        num_window_blocks=plan.num_window_block_ids or plan.num_window_blocks,
        num_scratch_blocks=0 if branches is None else branches.num_scratch_blocks,
        host_states=plan.num_host_states(options["host_blocks"]),
        present=(plan.num_blocks, plan.num_window_blocks),
        **options,
    )


def _facts(
    given: PlanInput, plan: MemoryPlan, attention: AttentionBackend | None, device: Device
) -> ModelFacts:
    spec = given.whole
    return ModelFacts(
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        dtype=given.dtype,
        attention_backend="native" if attention is None else attention.name,
        level=load_native().level if attention is None else "",
        device=str(device),
        num_layers=spec.num_layers,
        # A draft model reads the same tables, as far back as it likes.
        window=None if given.has_draft_model or spec.bidirectional else spec.window,
        tasks=() if spec.pooling is None else spec.pooling.asked.tasks,
        whole_prompts=spec.bidirectional,
        shares_prefixes=spec.shares_prefixes,
        num_pooled=0 if spec.pooling is None else spec.pooling.asked.num_dimensions,
        work=work_of(given, plan, _name_of(device)),
        attention_balance=spec.attention_balance,
        remembers_because=given.remembers_because,
        unmeasured_because="its layers are shared among several ranks" if given.num_ranks > 1 else "",
        unplanned_because="" if given.config.cache.forgotten_bytes else "engine.cache.forgotten_bytes is 0",
        drafter=given.config.speculation.method,
    )


def _name_of(device: Any) -> str:
    """As an accelerator calls itself; a core on a CPU does without torch."""
    if device.type != "cuda":
        return ""
    import torch

    return torch.cuda.get_device_name(device)


build_here = functools.partial(build, load=load_here)
"""The same, loaded with this process's torch: for tests and tools."""


def _load(
    given: PlanInput,
    load: Load,
    request: LoadRequest,
    progress: Progress,
    group: RankGroup | None = None,
) -> tuple[Model, AttentionBackend | None, Device]:
    """A model, what computes its attention (None where a native program does), and where it is. The ranks of
    a group load their parts of it meanwhile.
    """
    spec, threads = request.spec, request.config.num_threads
    library = native_library(given.config, spec, given.device)
    method = given.config.speculation.method
    if library is None and (given.head is not None or method == LOOKAHEAD):
        done = "branches are computed" if method == LOOKAHEAD else "hidden states are captured"
        raise ConfigError(
            f"engine.speculation.method = {method!r}: {done} by the native kernels of CPUs, and torch "
            "serves this model here; set engine.native to required to be told why, or the method to ngram, "
            "suffix or draft_model"
        )
    attention: AttentionBackend | None = None
    device: Device = HOST
    if library is not None:
        library.usual_threads = threads
    else:
        import torch

        from engine.runner.attention_choice import attention_of

        torch.set_num_threads(threads)
        device = torch.device(given.device)
        attention = attention_of(given.config, spec, getattr(torch, given.dtype), device)
    load_own = functools.partial(
        load_model, device=given.device, library=library, progress=progress, load=load
    )
    model = load_own(request) if group is None else _load_shared(group, request, library, load_own)
    return model, attention, device


def _load_shared(
    group: RankGroup, request: LoadRequest, library: NativeLibrary | None, load_own: Callable[..., Model]
) -> Model:
    """The first rank's part of a model, when all have theirs."""
    if library is None:
        raise ConfigError(
            f"{request.config.parallel.asked}: ranks compute by the native kernels, which do "
            "not serve here (the log says why); set it to 1"
        )
    own, ranks = group.start(request, library)
    try:
        model = load_own(own, ranks=ranks)
        group.wait_until_ready()
    except BaseException:
        group.close()
        raise
    return model


def _host_runner(
    config: EngineConfig,
    model: Model,
    attention: AttentionBackend | None,
    storage: KvStorage,
    grammar: GrammarEngine,
    proposer: Proposer,
) -> ModelRunner:
    """A runner whose steps are computed by the CPUs."""
    table = SequenceTable(
        vocab_size=model.spec.vocab_size,
        max_model_len=model.max_model_len,
        device=model.device,
        grammar=grammar,
    )
    table.sampling.native = config.native != "off"
    table.branch_room = _branch_room(config, storage)
    executor: Executor
    if isinstance(model, NativeDecoder):
        executor = NativeExecutor(model, storage, table)
    else:
        from engine.runner.executors.torch import TorchExecutor

        assert attention is not None, "what computes the attention of a decoder of torch"
        executor = TorchExecutor(cast("Decoder", model), attention, storage, table)
    thread = None
    if config.scheduler.overlap == "on":
        # The native library has a pool of its own.
        count = 0 if isinstance(model, NativeDecoder) else config.num_threads
        thread = ThreadPoolExecutor(1, "runner", initializer=_set_threads, initargs=(count,))
    return ModelRunner(
        executor=executor,
        table=table,
        storage=storage,
        grammar=grammar,
        proposer=proposer,
        thread=thread,
    )


def _branch_room(config: EngineConfig, storage: KvStorage) -> BranchRoom | None:
    """The scratch blocks behind the spare one, by slot."""
    branches = branch_shape(config)
    if branches is None:
        return None
    return BranchRoom(
        first_block=storage.num_blocks + 1,
        blocks_each=branches.num_blocks,
        num_slots=branches.num_sequences,
        most_rows=config.scheduler.max_num_batched_tokens,
        first_recent=num_slots(config),
        recent_each=branches.num_branches // branches.num_sequences,
    )


def _draft_request(given: PlanInput, draft: DraftInput, plan: MemoryPlan) -> LoadRequest:
    """What drafts."""
    return LoadRequest(
        folder=Path(draft.folder),
        spec=draft.spec,
        dtype=given.dtype,
        max_model_len=plan.max_model_len + given.config.speculation.num_draft_tokens,
        config=draft_config(given.config, draft.spec),
    )


def _drafter(
    given: PlanInput,
    load: Load,
    plan: MemoryPlan,
    target: Model,
    storage_options: dict[str, Any],
    progress: Progress,
) -> Drafter | None:
    """What drafts that are not looked up come from, which the plan counts in."""
    ahead = LookaheadShape.where_asked(given.config)
    if given.draft is not None and given.head is None:
        return _draft_model(given, given.draft, load, plan, storage_options, progress)
    if given.draft is None and ahead is None:
        return None
    assert isinstance(target, NativeDecoder), "refused otherwise"
    target.copies_slots = branch_shape(given.config) is not None
    if given.draft is None:
        return LookaheadDrafter(cast("LookaheadShape", ahead))
    return _head(given, given.draft, load, plan, target, storage_options, progress)


def _head(
    given: PlanInput,
    draft: DraftInput,
    load: Load,
    plan: MemoryPlan,
    target: NativeDecoder,
    storage_options: dict[str, Any],
    progress: Progress,
) -> Drafter:
    """A head, or heads. From here on the target captures what is read of it."""
    spec, request = draft.spec.draft_head, _draft_request(given, draft, plan)
    assert spec is not None, "read as a head"
    target.captured_layers = spec.layers_of(target.spec.num_layers)
    tree = DraftTree.where_asked(given.config)
    load_record = functools.partial(
        load, request, target.library, lambda phase, part: progress("load draft head", part)
    )
    num_rooms = given.config.scheduler.max_num_seqs
    if isinstance(spec, MedusaSpec):
        heads = NativeMedusaHeads(load_record(), target, max_rows=num_rooms)
        return MedusaDrafter(heads, target, num_rooms=num_rooms, tree=tree)
    rooms = HeadRooms.of(draft.spec, given.config)
    sizes = {"max_tokens": MAX_READ_TOKENS + rooms.num_forks, "max_rows": num_rooms + rooms.num_forks}
    head = (
        NativePredictor(load_record(), target, **sizes)
        if isinstance(spec, PredictionSpec)
        else NativeDraftHead(load_record(), target.library, num_threads=target.num_threads, **sizes)
    )
    head.share_embedding(target.record)
    options = {**storage_options, "host_blocks": 0}
    storage = KvStorage(draft.spec, num_blocks=rooms.num_all_blocks, **options)
    storage.keep_newest_keys(rooms.num_rooms + rooms.num_forks)
    return HeadDrafter(head, target, storage, rooms)


def _draft_model(
    given: PlanInput,
    draft: DraftInput,
    load: Load,
    plan: MemoryPlan,
    storage_options: dict[str, Any],
    progress: Progress,
) -> DraftModel:
    """A model that runs ahead, over the target's blocks."""
    spec, num_scratch = draft.spec, num_scratch_blocks(given.config)
    model, attention, device = _load(
        given,
        load,
        _draft_request(given, draft, plan),
        lambda phase, part: progress("load draft model", part),
    )
    # Its contents follow from the tokens, so nothing of it is kept on the host.
    options = {**storage_options, "device": device, "host_blocks": 0}
    num_states = num_draft_states(spec, given.config)
    storage = KvStorage(spec, num_blocks=plan.num_blocks + num_scratch, num_states=num_states, **options)
    storage.keep_newest_keys(num_slots(given.config))
    return DraftModel(model, attention, storage, num_scratch_blocks=num_scratch)


def _set_threads(num_threads: int) -> None:
    """Threads of a forward of torch; 0 leaves torch out."""
    if num_threads:
        import torch

        torch.set_num_threads(num_threads)
