"""The runner of GPUs over Triton's kernels in the interpreter: overlapped, captured, padded, end to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig, GraphsConfig, SchedulerConfig
from engine.kernels.attention.triton_attention import TritonAttention
from engine.runner.cuda.build import make_device_runner
from engine.types import SamplingParams
from tests.kernels.triton.test_decoder import TRITON
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.cuda.test_device_runner import OverlappedDriver
from tests.unit.engine.runner.driver import GREEDY, Driver, Job, open_runner, prompt_of

OPTIONS = {"native": "off", "attention_backend": "torch", "kv_cache_bytes": 4 << 20, "max_model_len": 96}
SAMPLED = SamplingParams(temperature=0.9, top_k=30, seed=2, frequency_penalty=0.3, max_tokens=64, logprobs=1)


class PlainRecorder:
    """Runs captured work again. (The interpreter moves tensors about: their addresses follow no rules.)"""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work: Callable[[], None]) -> Any:
        def replay() -> None:
            self.num_replays += 1
            work()

        work()
        return SimpleNamespace(replay=replay)


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_tokens_are_those_of_the_plain_runner(tmp_path: Path, name: str) -> None:
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes | {"num_hidden_layers": 2})
    plain = open_runner(tmp_path, kernels=TRITON, **OPTIONS)
    spec = plain.model.spec
    recorder = PlainRecorder()
    runner = make_device_runner(
        EngineConfig(graphs=GraphsConfig(rows=(2, 4)), scheduler=SchedulerConfig(max_num_seqs=4)),
        plain.model,
        TritonAttention(num_heads=spec.num_heads, num_kv_heads=spec.cache_heads),
        recorder=lambda device: recorder,
        storage=plain.storage,
        grammar=plain.grammar,
        proposer=plain.proposer,
        native_sampling=False,
    )
    jobs = [
        Job(prompt_of(length, 199, seed=length), 4, sampling)
        for length, sampling in ((21, GREEDY), (4, SAMPLED), (33, SAMPLED))
    ]
    OverlappedDriver(runner).drive(jobs, 3, most=3)
    assert recorder.num_replays > 0
    runner.close()
    reference = open_runner(tmp_path, **OPTIONS)
    expected = Driver(reference).run([replace(job, output=[], logprobs=[]) for job in jobs])
    reference.close()
    assert [job.output for job in jobs] == [job.output for job in expected]
