"""The whole path of a GPU on a device that is not the CPU and computes nothing (torch's "meta"): no operation
mixes devices, nothing asks the device for a number, and every kernel is launched with what its signature has.
"""

from __future__ import annotations

import gc
import importlib
import inspect
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import EngineConfig, SchedulerConfig
from engine.model.checkpoint import LoadRequest
from engine.model.families import read_spec
from engine.model.reading import load_decoder
from engine.runner.base import RunnerBroken
from engine.runner.cuda.build import _dummy_step, make_device_table
from engine.runner.cuda.decode_graphs import DecodeGraphs
from engine.runner.executors.device import DeviceExecutor, raise_if_broken
from engine.runner.kv_storage import KvStorage
from engine.runner.runner import ModelRunner
from engine.runner.speculation.proposer import Proposer
from engine.sampling.grammar import GrammarEngine
from engine.types import SamplingParams, ScheduledSequence, SchedulerOutput
from kernels import selection
from kernels.attention import triton_attention
from kernels.attention.triton_attention import TritonAttention
from kernels.config import KernelsConfig
from kernels.host import on_device
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.driver import Job, new_sequence

ELSEWHERE = torch.device("meta")
LAUNCHERS = (
    "activation.triton_activation",
    "attention.triton_attention",
    "experts.triton_experts",
    "linear.triton_dense",
    "linear.triton_grouped",
    "linear.triton_linear",
    "linear.triton_rows",
    "linear.triton_scaled",
    "norm.triton_norm",
    "paged_cache.triton_channels",
    "paged_cache.triton_four_bits",
    "rope.triton_rope",
    "sampling.triton_filters",
    "sampling.triton_sampling",
)
# Programs along the second and third axis of a grid.
MOST_PROGRAMS = 65535
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        seed=3,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        logit_bias={3: 2.0},
        min_tokens=4,
        stop_token_ids=(3, 11),
        max_tokens=9,
        logprobs=2,
    ),
    SamplingParams(temperature=1.0, allowed_token_ids=(5, 6), max_tokens=9),
)


class OneDevice(TorchDispatchMode):
    """Fails where an operation takes tensors of two devices (numbers aside). What is copied to the host stays
    what it was there.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.name() == "aten::copy_":
            # Between devices by definition.
            return args[0] if args[1].device.type == "meta" else func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        assert len(devices) < 2, f"{func.name()} takes {[(t.device.type, t.shape) for t in tensors]}"
        return func(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(tuple(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


class Launches:
    """Stands for a kernel: checks what it is launched with, and computes nothing."""

    def __init__(self, kernel: Any, counts: Counter[str]) -> None:
        self.name, self.parameters, self.counts = kernel.fn.__name__, set(kernel.arg_names), counts
        self.order = list(kernel.arg_names)
        given = inspect.signature(kernel.fn).parameters.values()
        self.required = {each.name for each in given if each.default is each.empty}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            assert all(0 < size <= MOST_PROGRAMS for size in grid[1:]), (self.name, grid)
            devices = {each.device.type for each in given if isinstance(each, Tensor)}
            assert devices == {"meta"}, (self.name, devices)
            options = {"num_warps", "num_stages"}
            known = [*self.order[: len(given)], *(set(named) - options)]
            assert len(known) == len(set(known)), (self.name, known)
            assert self.required <= set(known) <= self.parameters, (self.name, known)
            for each in given:
                if isinstance(each, Tensor):
                    # An operation, which whoever watches those sees.
                    each.detach()
            self.counts[self.name] += 1

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Numbers of launches by kernel."""
    counts: Counter[str] = Counter()
    for name in LAUNCHERS:
        module = importlib.import_module(f"kernels.{name}")
        for attribute, value in list(vars(module).items()):
            if attribute.endswith("_kernel"):
                monkeypatch.setattr(module, attribute, Launches(value, counts))
    monkeypatch.setattr(selection, "_triton_runs", lambda device: True)
    monkeypatch.setattr(triton_attention, "arch_of", lambda device: "sm_90")
    return counts


class Given(TorchDispatchMode):
    """Notes what work takes from outside, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        # Kept, so that nothing from outside is taken for them.
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:
                self.storages[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in self.storages:
                self._made[tensor.untyped_storage()._cdata] = tensor
        return out


class Recorder:
    """Runs work that is captured once and forgets it, as a CUDA graph does, which keeps addresses alone."""

    def __init__(self) -> None:
        self.given: list[StorageWeakRef] = []

    def record(self, work: Any) -> Any:
        with Given() as given:
            work()
        self.given.extend(given.storages.values())
        return SimpleNamespace(replay=lambda: None)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8", "kivi4"])
@pytest.mark.parametrize(
    ("name", "quantize", "linear"),
    [
        ("llama", "off", "triton"),
        ("llama", "fp8", "triton"),
        ("llama", "off", "invariant"),
        ("gemma2", "off", "triton"),
        ("gpt-oss", "off", "triton"),
        ("mixtral", "int8", "triton"),
        ("deepseek-v3", "fp8", "invariant"),
    ],
)
def test_devices_are_never_mixed(
    name: str, quantize: str, linear: str, kv_dtype: str, tmp_path: Path, launches: Counter[str]
) -> None:
    model_type, changes = CASES[name]
    if kv_dtype == "kivi4" and name in ("llama", "mixtral"):
        # Keys by channel are of a multiple of 16 elements.
        changes = changes | {"head_dim": 16}
    make_checkpoint(tmp_path, model_type, **changes)
    spec = read_spec(tmp_path)
    if kv_dtype == "kivi4" and spec.latent is not None:
        pytest.skip("refused by name")
    config = EngineConfig(quantize=quantize, scheduler=SchedulerConfig(max_num_seqs=8))
    names = dict.fromkeys(selection.OPERATIONS, "triton") | {"linear": linear}
    kernels = selection.choose_kernels(KernelsConfig(**names), torch.device("cpu"))
    with OneDevice(), torch.inference_mode():
        model = load_decoder(
            LoadRequest(folder=tmp_path, spec=spec, dtype="bfloat16", max_model_len=96, config=config),
            device=ELSEWHERE,
            progress=lambda phase, part: None,
            kernels=kernels,
        )
        attention = TritonAttention(num_heads=spec.num_heads, num_kv_heads=spec.cache_heads)
        size = 64 if kv_dtype == "kivi4" else 16
        storage = KvStorage(spec, num_blocks=40, block_size=size, kv_dtype=kv_dtype, device=ELSEWHERE)
        storage.keep_newest_keys(16)
        # Decode rows, prompts, and what is captured.
        _dummy_step(model, attention, storage, 5, 5)
        _dummy_step(model, attention, storage, 60, 2)
        grammar = GrammarEngine(tmp_path, spec.vocab_size, spec.eos_token_ids)
        table = make_device_table(model, storage, grammar, max_num_seqs=8)
        table.sampling.native = False
        executor = DeviceExecutor(model, attention, storage, table, graphs=lambda made: None)
        runner = ModelRunner(
            executor=executor,
            table=table,
            storage=storage,
            grammar=grammar,
            proposer=Proposer(config.speculation, None),
        )
        assert model.captures
        graphs = DecodeGraphs(
            model,
            attention,
            storage.layers,
            table,
            sizes=(1, 2, 4, 8),
            block_size=size,
        )
        recorder = Recorder()
        graphs.capture(recorder)
        gc.collect()
        assert len(recorder.given) > 4 * len(storage.layers)
        assert not any(given.expired() for given in recorder.given), "a graph reads memory that is nobody's"
        executor.graphs = graphs
        for plan in _plans():
            step = runner.launch(plan)
            if step.error is not None:
                raise step.error
            # Nobody reads the tokens, of which there are none.
            runner._outstanding = None
    assert launches["draw_kernel"] == launches["settle_kernel"] == 5
    # Anew after stop tokens were taken out.
    assert launches["process_logits_kernel"] == 9
    assert launches["attention_kernel"] > launches["merge_kernel"] > 0
    assert launches["list_parts_kernel"] >= 4
    runner.grammar.close()


def _plans() -> list[SchedulerOutput]:
    """Prompts, a captured step, a chunk beside decode rows, a chunk alone that draws nothing; drafts, and
    drafts behind these.
    """

    def decode(position: int) -> tuple[ScheduledSequence, ...]:
        return tuple(ScheduledSequence(number, position + number, 1, (), True) for number in (1, 2, 3))

    def drafted(position: int) -> tuple[ScheduledSequence, ...]:
        return tuple(ScheduledSequence(number, position + number, 3, (), True, (4, 5)) for number in (1, 3))

    asked = [Job(list(range(1, 20 + number)), sampling=SAMPLINGS[number - 1]) for number in (1, 2, 3)]
    prompts = tuple(
        new_sequence(number, job, (2 * number, 2 * number + 1)) for number, job in enumerate(asked, 1)
    )
    long = new_sequence(9, Job(list(range(1, 60)), sampling=SAMPLINGS[0]), (20, 21, 22, 23))
    whole = tuple(ScheduledSequence(number, 0, 19 + number, (), True) for number in (1, 2, 3))
    return [
        SchedulerOutput(1, prompts, whole),
        SchedulerOutput(2, (), decode(19)),
        SchedulerOutput(3, (long,), (ScheduledSequence(9, 0, 30, (), False), *decode(20))),
        SchedulerOutput(4, (), (ScheduledSequence(9, 30, 10, (), False),)),
        SchedulerOutput(5, (), (*drafted(21), ScheduledSequence(2, 23, 1, (), True))),
        SchedulerOutput(6, (), (*drafted(24), ScheduledSequence(2, 24, 1, (), True))),
    ]


def test_nothing_goes_to_the_device_as_nothing() -> None:
    there = on_device(np.zeros((0, 3), np.int32), ELSEWHERE)
    assert (there.shape, there.dtype, there.device) == ((0, 3), torch.int32, ELSEWHERE)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ],
)
def test_a_lost_device_breaks_the_runner(message: str) -> None:
    with pytest.raises(RunnerBroken):
        raise_if_broken(RuntimeError(message))


@pytest.mark.parametrize(
    "message", ["Triton Error [CUDA]: out of memory", "CUDA error: out of memory", "shapes do not match"]
)
def test_an_error_after_which_the_device_goes_on_does_not(message: str) -> None:
    raise_if_broken(RuntimeError(message))
