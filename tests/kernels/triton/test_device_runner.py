"""The runner of GPUs over Triton's kernels in the interpreter: overlapped, captured, padded, end to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig, GraphsConfig, SchedulerConfig
from engine.runner.cuda.build import make_device_runner
from engine.runner.runner import ModelRunner
from engine.types import Request, SamplingParams
from kernels.attention.triton_attention import TritonAttention
from tests.kernels.triton.test_decoder import TRITON
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.cuda.test_device_runner import OverlappedDriver
from tests.unit.engine.runner.cuda.test_queued_speculation import LOOK_UP, PLAIN, Watched
from tests.unit.engine.runner.driver import GREEDY, Job, generated, open_runner, prompt_of

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


def captured_runner(
    plain: ModelRunner, recorder: PlainRecorder, rows: tuple[int, ...], max_num_seqs: int = 4, **config: Any
) -> ModelRunner:
    """The runner of GPUs for a plain one's model, whose decode steps are captured."""
    scheduler, spec = SchedulerConfig(max_num_seqs=max_num_seqs), plain.model.spec
    return make_device_runner(
        EngineConfig(graphs=GraphsConfig(rows=rows), scheduler=scheduler, **config),
        plain.model,
        TritonAttention(num_heads=spec.num_heads, num_kv_heads=spec.cache_heads),
        recorder=lambda device: recorder,
        storage=plain.storage,
        grammar=plain.grammar,
        proposer=plain.proposer,
        native_sampling=False,
    )


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 2), ("mixtral", 1)])
def test_tokens_are_those_of_the_plain_runner(tmp_path: Path, name: str, num_layers: int) -> None:
    """Of each kind of layer one."""
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes | {"num_hidden_layers": num_layers})
    recorder = PlainRecorder()
    runner = captured_runner(open_runner(tmp_path, kernels=TRITON, **OPTIONS), recorder, rows=(2, 4))
    jobs = [
        Job(prompt_of(length, 199, seed=length), 4, sampling)
        for length, sampling in ((21, GREEDY), (4, SAMPLED), (33, SAMPLED))
    ]
    OverlappedDriver(runner).drive(jobs, 3, most=3)
    assert recorder.num_replays > 0
    runner.close()
    expected = generated(tmp_path, [replace(job, output=[], logprobs=[]) for job in jobs], **OPTIONS)
    assert [job.output for job in jobs] == [job.output for job in expected]


def test_keys_by_channel_are_captured(tmp_path: Path) -> None:
    """Prompts and answers that end blocks, and an answer that begins one."""
    make_checkpoint(tmp_path, "llama", head_dim=16, num_hidden_layers=1)
    options = OPTIONS | {"cache": {"kv_dtype": "kivi4", "block_size": 64}, "max_model_len": 256}
    recorder = PlainRecorder()
    runner = captured_runner(open_runner(tmp_path, kernels=TRITON, **options), recorder, rows=(2, 4))
    jobs = [
        Job(prompt_of(length, 199, seed=length), 4, sampling, chunk=chunk)
        for length, sampling, chunk in ((62, GREEDY, 40), (128, SAMPLED, 1 << 30), (150, SAMPLED, 1 << 30))
    ]
    OverlappedDriver(runner).drive(jobs, 3, most=3)
    assert recorder.num_replays > 0
    runner.close()
    expected = generated(tmp_path, [replace(job, output=[], logprobs=[]) for job in jobs], **options)
    assert [job.output for job in jobs] == [job.output for job in expected]


def test_drafts_behind_drafts_on_their_way(tmp_path: Path) -> None:
    """The draw of a step whose positions only the device knows has the noise of these positions."""
    model_type, changes = CASES["llama"]
    make_checkpoint(tmp_path, model_type, **changes | {"num_hidden_layers": 1})
    plain = open_runner(tmp_path, kernels=TRITON, speculation=LOOK_UP, **OPTIONS)
    runner = captured_runner(plain, PlainRecorder(), rows=(4, 15), max_num_seqs=3, speculation=LOOK_UP)
    few = tuple(range(20, 24))
    samplings = (
        {"temperature": 0.7, "seed": 1, "allowed_token_ids": few},
        {"temperature": 0.0, "allowed_token_ids": few, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"temperature": 0.5, "seed": 2, "allowed_token_ids": few, "frequency_penalty": 0.1},
    )
    requests = [
        Request(
            request_id=number,
            external_id="",
            prompt_token_ids=(*few, number) * 3,
            sampling=SamplingParams(max_tokens=12, **options),
        )
        for number, options in enumerate(samplings, start=1)
    ]
    queued = Watched(runner, True, 1 << 20)
    queued.run(requests)
    reference = Watched(open_runner(tmp_path, **PLAIN), False, 1 << 20)
    reference.run(requests)
    for request in requests:
        assert queued.tokens(request.request_id) == reference.tokens(request.request_id)
    assert queued.num_queued > 5
    assert queued.sum_of("accepted_tokens") > 0
    assert queued.sum_of("drafted_tokens") > queued.sum_of("accepted_tokens")
