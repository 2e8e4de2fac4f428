"""What the host hands to a GPU in one step, and how long that takes it, without the GPU.

Llama-3.1-8B's shape and the runner of GPUs with Triton's kernels, over a device that computes nothing
(torch's "meta"): operations and kernels are counted, and the host's time is that of planning, inputs,
options, Python and torch's dispatch. Left out is what only a driver costs, a few microseconds for each
launch. Every step is launched and read; contexts are of 1,024 tokens, a step that verifies has four drafts
for each sequence, a mixed one has one chunk of 512 tokens beside its decode rows, and the sequences of a
prefill step compute 64 tokens each. The baseline in the same run is the same step without captured graphs.

    python -m benchmarks.engine.step_work [--json OUT]
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine.report import Row, arguments, publish
from benchmarks.gpu.random_model import LLAMA_8B, drawn_weights, write_checkpoint
from engine.config import EngineConfig
from engine.model.checkpoint import LoadRequest
from engine.model.decoder import Decoder
from engine.model.families import read_spec
from engine.model.reading import load_decoder
from engine.runner.cuda.build import make_device_table
from engine.runner.cuda.decode_graphs import DecodeGraphs, ladder
from engine.runner.executors.device import DeviceExecutor
from engine.runner.kv_storage import KvStorage
from engine.runner.runner import ModelRunner
from engine.runner.speculation.proposer import Proposer
from engine.sampling.grammar import GrammarEngine
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels import selection
from kernels.attention import triton_attention
from kernels.attention.triton_attention import TritonAttention
from kernels.config import KernelsConfig
from kernels.sampling.on_device import DeviceDrawn

_ELSEWHERE = torch.device("meta")
_SIZES = (1, 16, 128)
_CONTEXT, _CHUNK, _PREFILL, _BLOCK = 1024, 512, 64, 16
# None is what is drawn, so that every step goes on by one token.
_DRAFTS = (7, 7, 7, 7)
_MODULES = ("activation.triton_activation", "attention.triton_attention", "linear.triton_linear")
_MORE_MODULES = ("linear.triton_dense", "norm.triton_norm", "rope.triton_rope")
_DRAW_MODULES = ("sampling.triton_filters", "sampling.triton_sampling")
# Operations that make a view, or nothing: the device does not hear of them.
_SILENT = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "narrow", "permute"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze"),
    *("view", "_unsafe_view"),
}
_SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=1 << 20)


class _Operations(TorchDispatchMode):
    """Counts what torch asks of the device."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        there = any(isinstance(each, Tensor) and each.device == _ELSEWHERE for each in (*args, out))
        if name not in _SILENT and (there or name == "_to_copy"):
            self._counts["torch operations"] += 1
        return out


class _Kernel:
    """Stands for one of Triton's."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *given: Any, **named: Any) -> None:
        self._counts["kernels"] += 1


class _Recorder:
    """Forgets what it captures; a replay is one launch."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def record(self, work: Callable[[], None]) -> Any:
        def replay() -> None:
            self._counts["graphs"] += 1

        work()
        return SimpleNamespace(replay=replay)


def _stand_in(counts: Counter[str]) -> None:
    """Kernels that count; a device that says it runs Triton; and tokens that a host can read."""
    packed = DeviceDrawn.packed

    def readable(drawn: DeviceDrawn) -> Tensor:
        return torch.ones(packed(drawn).shape, dtype=torch.int64)

    DeviceDrawn.packed = readable
    for name in (*_MODULES, *_MORE_MODULES, *_DRAW_MODULES):
        module = importlib.import_module(f"kernels.{name}")
        for attribute in [each for each in vars(module) if each.endswith("_kernel")]:
            setattr(module, attribute, _Kernel(counts))
    selection._triton_runs = lambda device: True
    triton_attention.arch_of = lambda device: "sm_90"


def _model(folder: Path) -> Decoder:
    write_checkpoint(folder, LLAMA_8B)
    config = EngineConfig()
    names = dict.fromkeys(selection.OPERATIONS, "triton")
    kernels = selection.choose_kernels(KernelsConfig(**names), torch.device("cpu"))
    with drawn_weights():
        return load_decoder(
            LoadRequest(
                folder=folder, spec=read_spec(folder), dtype="bfloat16", max_model_len=8192, config=config
            ),
            device=_ELSEWHERE,
            progress=lambda phase, part: None,
            kernels=kernels,
        )


class _Steps:
    """A runner, its sequences, and plans of one kind."""

    def __init__(self, model: Decoder, folder: Path, counts: Counter[str], count: int, graphs: bool) -> None:
        spec = model.spec
        attention = TritonAttention(num_heads=spec.num_heads, num_kv_heads=spec.cache_heads)
        storage = KvStorage(
            spec, num_blocks=1 << 15, block_size=_BLOCK, kv_dtype="bfloat16", device=_ELSEWHERE
        )
        grammar = GrammarEngine(folder, spec.vocab_size, ())
        table = make_device_table(model, storage, grammar, max_num_seqs=2 * _SIZES[-1])

        def captured(executor: DeviceExecutor) -> DecodeGraphs | None:
            if not graphs:
                return None
            made = DecodeGraphs(
                model,
                attention,
                storage.layers,
                table,
                sizes=ladder(_SIZES[-1], most_drafts=len(_DRAFTS)),
                block_size=_BLOCK,
            )
            made.capture(_Recorder(counts))
            return made

        executor = DeviceExecutor(model, attention, storage, table, graphs=captured)
        self.runner = ModelRunner(
            executor=executor,
            table=table,
            storage=storage,
            grammar=grammar,
            proposer=Proposer(EngineConfig().speculation),
        )
        self._count = count
        self._blocks = itertools.count()
        self._steps, self._ids = itertools.count(), itertools.count(1 << 20)
        self._ended: tuple[int, ...] = ()
        new = tuple(self._new(index, _CONTEXT) for index in range(count))
        rows = (ScheduledSequence(index, _CONTEXT - 1, 1, (), True) for index in range(count))
        self._launch(SchedulerOutput(next(self._steps), new, tuple(rows)))

    def _new(self, sequence_id: int, length: int) -> NewSequence:
        # As many blocks as the whole run can need.
        blocks = tuple(next(self._blocks) % (1 << 15) for _ in range(length // _BLOCK + 8))
        return NewSequence(sequence_id, (7,) * length, length, _SAMPLING, 0, None, "", blocks)

    def _launch(self, plan: SchedulerOutput) -> None:
        self.runner.launch(plan).wait()

    def plans(self, kind: str) -> Iterator[SchedulerOutput]:
        """Steps of a kind, each after the one before."""
        for position in itertools.count(_CONTEXT):
            new: tuple[NewSequence, ...] = ()
            rows: tuple[ScheduledSequence, ...] = ()
            if kind != "prefill":
                drafts = _DRAFTS if kind == "verify" else ()
                rows = tuple(
                    ScheduledSequence(index, position, 1 + len(drafts), (), True, drafts)
                    for index in range(self._count)
                )
            if kind == "mixed":
                new = (self._new(next(self._ids), _CHUNK),)
                rows += (ScheduledSequence(new[0].sequence_id, 0, _CHUNK, (), True),)
            if kind == "prefill":
                new = tuple(self._new(next(self._ids), _CONTEXT) for _ in range(self._count))
                rows = tuple(
                    ScheduledSequence(each.sequence_id, _CONTEXT - _PREFILL, _PREFILL, (), True)
                    for each in new
                )
            yield SchedulerOutput(next(self._steps), new, rows, self._ended)
            self._ended = tuple(each.sequence_id for each in new)


def measure(model: Decoder, folder: Path, counts: Counter[str], kind: str, count: int, graphs: bool) -> Row:
    """Launches of one step, and the median microseconds of several."""
    steps = _Steps(model, folder, counts, count, graphs)
    plans = steps.plans(kind)
    seconds = []
    for _ in range(24):
        plan = next(plans)
        began = time.perf_counter()
        steps._launch(plan)
        seconds.append(time.perf_counter() - began)
    counts.clear()
    with _Operations(counts):
        steps._launch(next(plans))
    steps.runner.close()
    launches = {name: counts[name] for name in ("graphs", "kernels", "torch operations")}
    return {
        "step": kind,
        "sequences": count,
        "way": "captured" if graphs else "eager",
        **launches,
        "launches": sum(launches.values()),
        "host us": round(statistics.median(seconds[4:]) * 1e6),
    }


def main() -> None:
    """Every kind at every size, baseline first."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    _stand_in(counts)
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        model = _model(Path(name))
        rows = [
            measure(model, Path(name), counts, kind, count, graphs)
            for kind in ("decode", "verify", "mixed", "prefill")
            for count in _SIZES
            for graphs in (False, True)
        ]
    publish(
        "What the host hands to a GPU in one step of Llama-3.1-8B's shape",
        rows,
        options.json,
        "on a device that computes nothing: the driver's part of a launch is left out",
    )


if __name__ == "__main__":
    main()
