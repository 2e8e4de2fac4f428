"""The whole border: the front's client, a process under another interpreter's path, and a pretended vLLM."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from contract.pooling import PoolingParams
from contract.sampling import SamplingParams
from engine.config import AdaptersConfig, EngineConfig, SchedulerConfig, VllmConfig
from engine.core import messages
from engine.types import FinishReason, Request, RequestFailure, TokenEvent
from engine.vllm_core import client as client_module
from engine.vllm_core import launch
from engine.vllm_core.client import VllmClient
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.adapters.broken import one_value
from tests.unit.engine.vllm_core import pretend

LIMIT_S = 60.0


class Talk:
    """A client and what its core has said."""

    def __init__(self, client: VllmClient) -> None:
        self.client = client
        self.reports: list[messages.Report] = []
        self.events: list[TokenEvent] = []
        self._changed = asyncio.Event()
        client.on_report = self._receive

    def _receive(self, report: messages.Report) -> None:
        self.reports.append(report)
        if isinstance(report, messages.StepDone):
            self.events += report.events
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> Any:
        """The first true value of a condition over what was said."""

        async def wait() -> Any:
            while not (found := condition()):
                self._changed.clear()
                await self._changed.wait()
            return found

        return await asyncio.wait_for(wait(), LIMIT_S)

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.reports if isinstance(each, kind)]

    def tokens(self, request_id: int, choice: int = 0) -> list[int]:
        mine = [each for each in self.events if (each.request_id, each.choice_index) == (request_id, choice)]
        return [token for each in mine for token in each.token_ids]

    def end(self, request_id: int) -> TokenEvent | None:
        """The last event of a request, once it is its end."""
        mine = [each for each in self.events if each.request_id == request_id]
        return mine[-1] if mine and mine[-1].finish_reason is not None else None

    async def ask(self, request: Request) -> TokenEvent:
        self.client.send(messages.Submit(request))
        return await self.until(lambda: self.end(request.request_id))


def request(request_id: int, prompt: tuple[int, ...] = (5, 6), **fields: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **fields.pop("sampling", {})})
    return Request(
        request_id=request_id,
        external_id=str(request_id),
        prompt_token_ids=prompt,
        sampling=sampling,
        **fields,
    )


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    return [100 + (sum(prompt) + index) % 50 for index in range(count)]


def talking(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    story: Callable[[Talk], Awaitable[None]],
    version: str = "0.32.0",
    vllm: VllmConfig | None = None,
    adapters: AdaptersConfig | None = None,
) -> None:
    """Runs a story with a core that has started, or was refused."""
    packages = pretend.write(tmp_path / "packages", version)
    variables = launch.variables

    def with_packages(config: EngineConfig, folder: Path) -> dict[str, str]:
        found = variables(config, folder)
        return {**found, "PYTHONPATH": f"{found['PYTHONPATH']}:{packages}"}

    monkeypatch.setattr(client_module.launch, "variables", with_packages)
    settings = EngineConfig(
        make="vllm",
        vllm=vllm or VllmConfig(python=sys.executable),
        scheduler=SchedulerConfig(max_num_seqs=4),
        adapters=adapters or AdaptersConfig(),
    )

    async def run() -> None:
        client = VllmClient(messages.Start(settings, ModelConfig(path=str(tmp_path))))
        talk = Talk(client)
        await client.start()
        listening = asyncio.create_task(client.listen())
        try:
            await talk.until(lambda: talk.of(messages.Ready) or talk.of(messages.CoreRefused))
            await story(talk)
        finally:
            await client.stop()
            await listening

    asyncio.run(run())


def test_tokens_come_and_books_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')

    async def story(talk: Talk) -> None:
        (ready,) = talk.of(messages.Ready)
        assert (ready.memory.num_blocks, ready.memory.block_size) == (64, 16)
        assert ready.facts.eos_token_ids == (2,)
        first = await talk.ask(request(1, sampling={"n": 2, "best_of": 2}))
        assert first.finish_reason is FinishReason.LENGTH
        assert talk.tokens(1, 0) == talk.tokens(1, 1) == expected((5, 6), 4)
        told = [each.first_token for each in talk.events if each.first_token is not None]
        assert len(told) == 1, "a request tells of its first token once"
        assert told[0].prefill_chunks[0][2] == 2
        stop = expected((5, 6), 4)[2]
        stopped = await talk.ask(request(2, sampling={"stop_token_ids": (stop,), "max_tokens": 9}))
        assert (stopped.finish_reason, stopped.stop_token_id) == (FinishReason.STOP, stop)
        talk.client.send(messages.Check(7))
        checked = await talk.until(lambda: talk.of(messages.Checked))
        assert (checked[0].violation, checked[0].num_requests) == ("", 0)
        assert checked[0].num_unreferenced_blocks == checked[0].num_total_blocks == 64

    talking(tmp_path, monkeypatch, story)


def test_continuation_cancel_deadline_and_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"max_tokens": 200}

    async def story(talk: Talk) -> None:
        await talk.ask(request(1, output_token_ids=(1, 2, 3)))
        assert len(talk.tokens(1)) == 1, "three of four tokens were there"
        talk.client.send(messages.Submit(request(2, sampling=long)))
        await talk.until(lambda: talk.tokens(2))
        talk.client.send(messages.Cancel(2))
        cancelled = await talk.until(lambda: talk.end(2))
        assert cancelled.finish_reason is FinishReason.CANCELLED
        assert cancelled.statistics is not None
        late = await talk.ask(request(3, sampling=long, deadline_s=0.0))
        assert late.finish_reason is FinishReason.DEADLINE
        talk.client.send(messages.Submit(request(4, sampling=long)))
        await talk.until(lambda: talk.tokens(4))
        talk.client.send(messages.Fail(4, RequestFailure(reason="DRAINING", message="leaves")))
        failed = await talk.until(lambda: talk.end(4))
        assert failed.failure is not None
        assert failed.failure.reason == "DRAINING"
        poisoned = await talk.ask(request(5, (203,), sampling=long))
        assert poisoned.failure is not None
        assert poisoned.failure.reason == "POISONED_REQUEST"
        refused = await talk.ask(request(6, sampling={"logit_bias": {7: 77.0}}))
        assert refused.failure is not None
        assert "logit_bias: not this one" in refused.failure.message
        talk.client.send(messages.Check(8))
        checked = await talk.until(lambda: talk.of(messages.Checked))
        assert checked[0].violation == ""
        assert checked[0].num_runner_states == 0

    talking(tmp_path, monkeypatch, story)


def adapter(folder: Path, adds: int) -> str:
    """The folder of one whose answers are those of the model and so much more."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": adds}))
    tensors = {f"base_model.model.q_proj.lora_{part}.weight": np.ones((1, 1), np.float32) for part in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def test_adapters_are_read_before_anybody_is_told_that_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AdaptersConfig(paths={"first": adapter(tmp_path / "first", 100)}, slots=2)

    async def story(talk: Talk) -> None:
        async def add(name: str, folder: str) -> str:
            talk.reports.clear()
            talk.client.send(messages.AddAdapter(1, name, folder))
            (added,) = await talk.until(lambda: talk.of(messages.AdapterAdded))
            return str(added.problem)

        async def answer(number: int, name: str) -> TokenEvent:
            return await talk.ask(request(number, adapter=name))

        await answer(1, "first")
        assert talk.tokens(1) == [token + 100 for token in expected((5, 6), 4)]
        missing = str(tmp_path / "missing")
        problem = await add("bad", missing)
        assert missing in problem
        assert "no adapter_config.json" in problem
        broken = adapter(tmp_path / "broken", 0)
        one_value("A", math.nan)(Path(broken))
        problem = await add("bad", broken)
        assert broken in problem, "vLLM would serve it"
        assert "numbers that are not finite" in problem
        refused = (await answer(2, "bad")).failure
        assert refused is not None
        assert (refused.reason, "was removed" in refused.message) == ("INVALID_ARGUMENT", True)
        assert await add("second", adapter(tmp_path / "second", 200)) == ""
        await answer(3, "second")
        assert talk.tokens(3) == [token + 200 for token in expected((5, 6), 4)]
        talk.client.send(messages.DropAdapter("first"))
        assert (await answer(4, "first")).failure is not None
        await answer(5, "second")
        assert talk.tokens(5) == talk.tokens(3), "it is still known by the same number"
        # Which is not asked to read other files than those that were added.
        (tmp_path / "second" / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 2000}))
        refused = (await answer(6, "second")).failure
        assert refused is not None
        assert refused.reason == "INVALID_ARGUMENT"
        assert "has changed since the adapter was added; add it again" in refused.message

    talking(tmp_path, monkeypatch, story, adapters=config)


def test_an_adapter_that_cannot_be_read_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(talk: Talk) -> None:
        raise AssertionError("it started")

    config = AdaptersConfig(paths={"lost": str(tmp_path / "lost")}, slots=1)
    with pytest.raises(ConfigError, match=f"engine.adapters.paths: {tmp_path}.*no adapter_config.json"):
        talking(tmp_path, monkeypatch, story, adapters=config)


def test_the_door_answers_before_the_core_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(talk: Talk) -> None:
        for number, (asked, reason, field) in enumerate(
            (
                (request(1, sampling={"beam_width": 2}), "UNSUPPORTED_FIELD", "sampling.beam_width"),
                (request(2, sampling={"n": 1, "best_of": 3}), "UNSUPPORTED_FIELD", "sampling.best_of"),
                (request(3, tuple(range(3, 300))), "CONTEXT_LENGTH_EXCEEDED", "prompt"),
                (request(4, ()), "INVALID_ARGUMENT", "prompt"),
            ),
            start=1,
        ):
            end = await talk.ask(asked)
            assert end.request_id == number
            assert end.failure is not None
            assert (end.failure.reason, end.failure.field) == (reason, field)

    talking(tmp_path, monkeypatch, story)


def test_what_is_pooled_is_one_answer_by_the_checkpoints_own_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaModel"], "hidden_size": 3}')

    async def story(talk: Talk) -> None:
        (ready,) = talk.of(messages.Ready)
        assert ready.facts.tasks == ("embed",)
        assert (ready.facts.num_pooled, ready.facts.whole_prompts) == (3, True)
        assert ready.memory.num_blocks == 4 * 16, "the slots' full lengths, though nothing is kept"
        assert ready.memory.kv_cache_bytes == 0
        asked = [
            (PoolingParams(), [11, 0, 3]),
            (PoolingParams(dimensions=2), [11, 0]),
            (PoolingParams(second_start=1), [11, 1, 3]),
        ]
        for number, (pooling, raw) in enumerate(asked, start=1):
            end = await talk.ask(request(number, pooling=pooling))
            assert end.finish_reason is FinishReason.STOP
            assert end.first_token is not None
            assert end.first_token.prefill_chunks[0][2] == 2
            expected = np.array(raw, np.float32) / np.linalg.norm(raw)
            np.testing.assert_allclose(np.frombuffer(end.pooled, "<f4"), expected, rtol=1e-6)
        failed = await talk.ask(request(9, (204,), pooling=PoolingParams()))
        assert failed.failure is not None
        assert "not finite" in failed.failure.message
        talk.client.send(messages.Check(7))
        checked = await talk.until(lambda: talk.of(messages.Checked))
        assert (checked[0].violation, checked[0].num_requests) == ("", 0)

    talking(tmp_path, monkeypatch, story)


def test_a_pooling_that_vllm_lacks_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "hidden_size": 3}')
    modules = [{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    told = {"word_embedding_dimension": 3, "pooling_mode_weightedmean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(told))

    async def story(talk: Talk) -> None:
        (refused,) = talk.of(messages.CoreRefused)
        assert "vLLM has no pooling 'weighted', only cls, last, mean" in refused.message

    talking(tmp_path, monkeypatch, story)


@pytest.mark.parametrize(("prompt", "cause"), [((202,), "exit code 70"), ((200,), "exit code 9")])
def test_a_core_that_dies_ends_with_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: tuple[int, ...], cause: str
) -> None:
    async def story(talk: Talk) -> None:
        talk.client.send(messages.Submit(request(1, prompt)))
        await asyncio.wait_for(talk.client.ended.wait(), LIMIT_S)
        assert talk.client.end_cause == cause
        if cause == "exit code 70":
            end = talk.end(1)
            assert end is not None
            assert end.failure is not None
            assert end.failure.reason == "STEP_FAILED"
            assert talk.of(messages.Broken)

    talking(tmp_path, monkeypatch, story)


def test_a_core_that_hangs_says_nothing_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(talk: Talk) -> None:
        talk.client.watch(silence_limit_s=1.5, step_limit_s=600.0)
        process = psutil.Process(talk.client.pid)
        talk.client.send(messages.Submit(request(1, (201,))))
        await asyncio.wait_for(talk.client.ended.wait(), LIMIT_S)
        assert "hung" in talk.client.end_cause
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    talking(tmp_path, monkeypatch, story)


def test_what_cannot_start_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def other_version(talk: Talk) -> None:
        (refused,) = talk.of(messages.CoreRefused)
        assert "0.99.1" in refused.message
        assert "0.32.x" in refused.message

    talking(tmp_path / "version", monkeypatch, other_version, version="0.99.1")
    monkeypatch.undo()

    async def other_size(talk: Talk) -> None:
        (refused,) = talk.of(messages.CoreRefused)
        assert "tensor_parallel_size" in refused.message

    many = VllmConfig(python=sys.executable, tensor_parallel_size=64, any_version=True)
    talking(tmp_path / "size", monkeypatch, other_size, version="0.99.1", vllm=many)
