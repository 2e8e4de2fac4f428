"""What start-up does on a GPU beyond loading: memory is measured with a step of the largest size, and decode
steps are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig
from engine.model.decoder import Decoder
from engine.model.forward_batch import ForwardBatch
from engine.model.kv_memory import num_slots
from engine.model.plan import PlanInput, human, make_plan
from engine.runner.cuda.decode_graphs import DecodeGraphs, ladder
from engine.runner.cuda.device_table import DeviceTable
from engine.runner.cuda.recorder import CudaGraphRecorder, GraphRecorder
from engine.runner.executors.device import DeviceExecutor
from engine.runner.kv_storage import KvStorage
from engine.runner.runner import ModelRunner
from engine.runner.speculation.proposer import Proposer
from engine.sampling.grammar import GrammarEngine
from engine.types import MemoryPlan
from kernels.adapters.backends import captures_adapters
from kernels.attention.backends import AttentionBackend, CapturedAttention
from kernels.attention.ragged import RaggedBatch
from kernels.host import on_device
from kernels.recurrent.rows import StateRows

_log = logging.getLogger(__name__)

# About as much as the driver keeps for one captured graph; the rest of the plan's headroom is the
# allocator's.
GRAPH_BYTES = 8 << 20
# The matrix library's workspaces of the stream on which graphs are captured, which replays use, too.
LIBRARY_BYTES = 64 << 20


def sizes_of(config: EngineConfig, model: Decoder) -> tuple[int, ...]:
    """Numbers of rows to capture."""
    speculation = config.speculation
    most_drafts = 0 if speculation.method == "off" else speculation.num_draft_tokens
    return ladder(
        config.scheduler.max_num_seqs, config.graphs.rows, model.row_multiple, most_drafts=most_drafts
    )


def why_not_captured(config: EngineConfig, model: Decoder, attention: AttentionBackend) -> str:
    """Why decode steps stay eager; empty when they can be captured."""
    if model.spec.pooling is not None:
        return "the model generates nothing"
    if config.graphs.decode == "off":
        return "engine.graphs.decode is off"
    if not isinstance(attention, CapturedAttention):
        return f"attention back end {attention.name} asks the host"
    if model.num_adapter_slots and not captures_adapters(model.kernels):
        return "engine.kernels.linear = 'torch' sorts adapters on the host"
    if not model.captures:
        return "experts of this format are sorted on the host, or states are found there"
    return ""


def measured_plan(given: PlanInput, model: Decoder, attention: AttentionBackend) -> MemoryPlan:
    """The memory plan from what loading really took and a step of the largest size really takes. Raises
    ConfigError as make_plan does.
    """
    device, config = model.device, given.config
    weights = int(torch.cuda.memory_allocated(device))
    workspace = _largest_step_bytes(given, model, attention)
    if not why_not_captured(config, model, attention):
        workspace += _graph_bytes(config, model, attention, workspace)
    _log.info("memory: weights take %s, the largest step %s", human(weights), human(workspace))
    return make_plan(
        msgspec.structs.replace(given, measured_weights_bytes=weights, measured_workspace_bytes=workspace)
    )


@torch.inference_mode()
def _largest_step_bytes(given: PlanInput, model: Decoder, attention: AttentionBackend) -> int:
    """Peak of a step of max_num_batched_tokens tokens of max_num_seqs sequences, logits and draw included."""
    config, device = given.config, model.device
    scheduler = config.scheduler
    tokens, size = scheduler.max_num_batched_tokens, config.cache.block_size
    storage = KvStorage(
        model.spec,
        num_blocks=1,
        block_size=size,
        kv_dtype=given.kv_dtypes,
        device=device,
        host_blocks=0,
        num_states=1,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = int(torch.cuda.memory_allocated(device))
    storage.keep_newest_keys(num_slots(config))
    rows = min(scheduler.max_num_seqs, tokens)
    # Decode rows beside prompts take other kernels than prompts alone, which a request should not wait for.
    _dummy_step(model, attention, storage, rows, rows)
    for number in (rows, max(1, -(-tokens // given.max_model_len))):
        # Many short sequences, then as few and long ones as there can be.
        _dummy_step(model, attention, storage, tokens, number)
    if model.spec.pooling is not None:
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    logits = model.logits_of(
        torch.zeros(rows, model.spec.hidden_size, dtype=getattr(torch, given.dtype), device=device),
        np.arange(rows),
    )
    # The draw keeps a processed copy, and reports a normalized one.
    copies = [torch.log_softmax(logits, -1), logits.clone()]
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    del logits, copies, storage
    torch.cuda.empty_cache()
    return peak


def _dummy_step(
    model: Decoder, attention: AttentionBackend, storage: KvStorage, tokens: int, num_sequences: int
) -> None:
    """A forward of so many tokens in so many sequences, all over block 0: what it computes means nothing."""
    lengths = np.full(num_sequences, tokens // num_sequences, np.int64)
    lengths[: tokens % num_sequences] += 1
    starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(tokens) - np.repeat(starts[:-1], lengths)
    size = storage.block_size
    padded = np.zeros((3, tokens + -tokens % model.row_multiple), np.int64)
    padded[1, :tokens] = positions
    padded[2, :tokens] = positions % size
    padded[2, tokens:] = storage.spare_slot
    ids, padded_positions, slots = on_device(padded, model.device).unbind()
    ragged = RaggedBatch(
        query_starts=starts,
        context_lens=lengths,
        block_tables=np.zeros((num_sequences, -(-int(lengths.max()) // size)), np.int64),
        block_size=size,
    )
    states = None
    if model.spec.state is not None:
        none = np.zeros(num_sequences, np.int64)
        states = StateRows.of(none, none, starts, [()] * num_sequences)
    batch = ForwardBatch(
        token_ids=ids,
        positions=padded_positions,
        slots=slots,
        ragged=ragged,
        states=states,
        recent_rows=storage.recent_rows(np.arange(num_sequences)),
    )
    model.forward(batch, storage.layers, attention)


def _graph_bytes(config: EngineConfig, model: Decoder, attention: AttentionBackend, step_bytes: int) -> int:
    """What captured steps keep for good: temporaries of the largest, their inputs, and the driver's own."""
    assert isinstance(attention, CapturedAttention), "asked before"
    sizes = sizes_of(config, model)
    share = -(-step_bytes * sizes[-1] // config.scheduler.max_num_batched_tokens)
    columns = -(-model.max_model_len // config.cache.block_size)
    tables = 4 * columns * (sizes[-1] + 2 * config.scheduler.max_num_seqs)
    work = attention.captured_workspace_bytes(sizes[-1], model.max_model_len, model.spec.value_dim)
    return share + tables + work + GRAPH_BYTES * len(sizes) + LIBRARY_BYTES


def make_device_runner(
    config: EngineConfig,
    model: Decoder,
    attention: AttentionBackend,
    *,
    storage: KvStorage,
    grammar: GrammarEngine,
    proposer: Proposer,
    native_sampling: bool = True,
    recorder: Callable[[torch.device], GraphRecorder] = CudaGraphRecorder,
    progress: Callable[[str, float], None] = lambda phase, part: None,
) -> ModelRunner:
    """A runner over loaded parts, its decode steps captured where they can be."""
    if model.kernels.names["sampling"] == "triton" and model.device.type == "cuda":
        from kernels.sampling.triton_sampling import compile_draw

        progress("compile kernels", 0.0)
        compile_draw(model.spec.vocab_size, model.device)
    table = make_device_table(model, storage, grammar, max_num_seqs=config.scheduler.max_num_seqs)
    table.sampling.native = native_sampling
    executor = DeviceExecutor(
        model,
        attention,
        storage,
        table,
        graphs=lambda made: _captured(config, made, recorder, progress),
    )
    return ModelRunner(executor=executor, table=table, storage=storage, grammar=grammar, proposer=proposer)


def make_device_table(
    model: Decoder, storage: KvStorage, grammar: GrammarEngine, *, max_num_seqs: int
) -> DeviceTable:
    """The table of the sequences of a model on a device."""
    return DeviceTable(
        # A slot is taken before that of a sequence that ended in the same plan is free.
        num_rows=2 * max_num_seqs,
        num_columns=-(-model.max_model_len // storage.block_size),
        spare_block=storage.num_blocks,
        vocab_size=model.spec.vocab_size,
        max_model_len=model.max_model_len,
        device=model.device,
        grammar=grammar,
    )


def _captured(
    config: EngineConfig,
    executor: DeviceExecutor,
    recorder: Callable[[torch.device], GraphRecorder],
    progress: Callable[[str, float], None],
) -> DecodeGraphs | None:
    """Decode steps, captured; None where they cannot be."""
    model, attention, storage = executor.model, executor.attention, executor.storage
    reason = why_not_captured(config, model, attention)
    if reason:
        _log.info("graphs: decode steps are not captured: %s", reason)
        return None
    assert isinstance(attention, CapturedAttention), "found out above"
    sizes = sizes_of(config, model)
    graphs = DecodeGraphs(
        model,
        attention,
        storage.layers,
        executor.table,
        sizes=sizes,
        block_size=storage.block_size,
    )
    try:
        graphs.capture(recorder(model.device), lambda part: progress("capture graphs", part))
    except RuntimeError:
        # Slower, and the same tokens: better than not serving at all.
        _log.exception("graphs: decode steps cannot be captured and stay eager")
        return None
    _log.info("graphs: decode steps of %s rows are captured", ", ".join(map(str, sizes)))
    return graphs
