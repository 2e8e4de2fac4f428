"""Drafts are verified by captured steps that are queued before the host knows what became of the drafts
before them; through loop and scheduler, the tokens are those of plain decoding.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.thinking import ThinkingTags
from engine.config import CacheConfig, SchedulerConfig
from engine.core import messages
from engine.core.loop import EngineLoop
from engine.runner.cuda.acceptance import accept
from engine.runner.inputs import StepInputs
from engine.runner.outcomes import LogitRows, num_confirmed
from engine.runner.runner import LaunchedStep, ModelRunner
from engine.runner.simulated import NamesAlone
from engine.scheduler import Scheduler
from engine.speculation_config import SpeculationConfig
from engine.types import FinishReason, Request, SamplingParams, ScheduledSequence, SchedulerOutput, TokenEvent
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.cuda.doubles import CheckedRecorder
from tests.unit.engine.runner.cuda.test_device_runner import open_device_runner
from tests.unit.engine.runner.drafting import BUNDLED, GRAMMAR
from tests.unit.engine.runner.driver import open_runner, prompt_of

PLAIN = {"native": "off", "attention_backend": "torch", "kv_cache_bytes": 8 << 20}
LOOK_UP = SpeculationConfig(method="ngram", min_ngram=1, min_acceptance=0.0)
VOCAB, MAX_LEN = 199, 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "llama", max_position_embeddings=MAX_LEN)
    return path


@dataclass
class Watched:
    """A loop over a real runner, its commands, and what came of them."""

    runner: ModelRunner
    overlap: bool
    num_blocks: int
    commands: list[messages.Command] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    num_queued: int = 0
    last: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        storage, model = self.runner.storage, self.runner.model
        memory = memory_plan(
            min(self.num_blocks, storage.num_blocks), storage.block_size, model.max_model_len
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=8), CacheConfig(), memory, model="m"
        )
        self.loop = EngineLoop(self.scheduler, cast(Any, self), cast(Any, self), overlap=self.overlap)

    # What the loop asks of a runner and of a mailbox.

    adapters = NamesAlone()

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        drafts = {each.sequence_id: len(each.draft_token_ids) for each in plan.scheduled}
        # Of sequences whose drafts in the step before nobody has read, since steps are launched ahead.
        self.num_queued += sum(self.overlap and self.last.get(each, 0) > 0 for each in drafts)
        self.last = drafts
        return self.runner.launch(plan)

    def is_ready(self, grammar: Any, tenant: str) -> bool:
        return True

    def receive(self, timeout_s: float) -> list[messages.Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, message: Any) -> None:
        assert not isinstance(message, messages.Broken), message
        if isinstance(message, messages.StepDone):
            self.events += message.events

    # What a test asks.

    def run(self, requests: list[Request], *, cancels: dict[int, int] | None = None, seed: int = 0) -> None:
        """To the end; requests arrive at any time, and are cancelled once they have so many tokens."""
        dice = random.Random(seed)
        waiting = list(requests)
        for _ in range(4000):
            while waiting and dice.random() < 0.4:
                self.commands.append(messages.Submit(waiting.pop(0)))
            for request_id, count in (cancels or {}).items():
                if len(self.tokens(request_id)) >= count and not self.reasons(request_id):
                    self.commands.append(messages.Cancel(request_id))
            self.loop.step()
            self.scheduler.check_invariants()
            if not waiting and not self.scheduler.has_work:
                break
        assert self.runner.num_states() == 0
        assert self.scheduler.num_unreferenced_blocks == self.scheduler.num_total_blocks
        self.runner.close()

    def tokens(self, request_id: int, choice: int = 0) -> list[int]:
        chosen = [
            each for each in self.events if (each.request_id, each.choice_index) == (request_id, choice)
        ]
        return [token for each in chosen for token in each.token_ids]

    def reasons(self, request_id: int) -> list[Any]:
        ends = [each for each in self.events if each.request_id == request_id and each.finish_reason]
        assert not any(each.failure for each in ends), ends
        return sorted((each.choice_index, each.finish_reason, each.stop_token_id) for each in ends)

    def logprobs(self, request_id: int) -> list[int]:
        reports = [
            report for each in self.events if each.request_id == request_id for report in each.logprobs
        ]
        return [report.token_id for report in reports]

    def sum_of(self, name: str) -> int:
        return sum(getattr(each.statistics, name) for each in self.events if each.statistics)


def opened(folder: Path, *, speculation: SpeculationConfig = LOOK_UP, **options: Any) -> ModelRunner:
    """A runner of GPUs on the CPU that looks drafts up, over captured steps."""
    return open_device_runner(folder, speculation=speculation, **options)


def requests_of(seed: int, count: int = 18) -> list[Request]:
    """Prompts that repeat themselves, under every kind of sampling."""
    dice = random.Random(seed)
    few = tuple(dice.sample(range(VOCAB), 3))
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        # What is drawn of few tokens repeats itself, so that drafts are accepted.
        {"temperature": 0.0, "allowed_token_ids": few},
        {"temperature": 0.5, "seed": seed, "allowed_token_ids": few, "n": 2, "best_of": 2},
        {"temperature": 0.0, "allowed_token_ids": few, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 9, "stop_token_ids": (5, 6, 7, 8, 9)},
        {"temperature": 0.3, "top_p": 0.9, "seed": seed, "n": 3, "best_of": 3},
        {"temperature": 0.2, "seed": 4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.1, "stop_token_ids": tuple(range(0, VOCAB, 9))},
        {"temperature": 0.4, "top_k": 20, "seed": 9, "min_tokens": 12, "stop_token_ids": tuple(range(80))},
    ]
    return [
        Request(
            request_id=number,
            external_id=str(number),
            prompt_token_ids=tuple(prompt_of(dice.randint(1, 9), VOCAB, seed=number) * dice.randint(2, 5)),
            sampling=SamplingParams(max_tokens=dice.randint(1, 60), **samplings[number % len(samplings)]),
        )
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("seed", "num_blocks"),
    # The second cache is too small for all that runs: sequences lose their places with drafts on their way.
    [(0, 1 << 20), (1, 44)],
)
def test_tokens_are_those_of_plain_decoding(folder: Path, seed: int, num_blocks: int) -> None:
    requests = requests_of(seed)
    recorder = CheckedRecorder()
    runner = opened(folder, recorder=recorder, max_num_seqs=8, cache={"block_size": 4})
    queued = Watched(runner, True, num_blocks)
    queued.run(requests, seed=seed)
    plain = Watched(open_runner(folder, **PLAIN), False, 1 << 20)
    plain.run(requests)
    for request in requests:
        for choice in range(request.sampling.n):
            found = queued.tokens(request.request_id, choice)
            assert found == plain.tokens(request.request_id, choice), (request.request_id, choice)
        assert queued.reasons(request.request_id) == plain.reasons(request.request_id)
        assert queued.logprobs(request.request_id) == plain.logprobs(request.request_id)
    assert queued.num_queued > 20
    assert queued.sum_of("accepted_tokens") > 50
    assert queued.sum_of("drafted_tokens") > queued.sum_of("accepted_tokens")
    assert queued.sum_of("num_steps") < plain.sum_of("num_steps")
    assert bool(queued.sum_of("num_preemptions")) == (num_blocks < 100)
    assert sum(recording.num_replays for recording in recorder.recordings) > 0


def test_who_leaves_with_drafts_on_the_way_disturbs_nobody(folder: Path) -> None:
    requests = requests_of(3, 20)
    cancels = {request.request_id: 4 + request.request_id for request in requests[::2]}
    queued = Watched(opened(folder, max_num_seqs=8), True, 1 << 20)
    queued.run(requests, cancels=cancels, seed=3)
    plain = Watched(open_runner(folder, **PLAIN), False, 1 << 20)
    plain.run(requests)
    for request in requests:
        for choice in range(request.sampling.n):
            found = queued.tokens(request.request_id, choice)
            expected = plain.tokens(request.request_id, choice)
            assert found == (expected[: len(found)] if request.request_id in cancels else expected)
    assert queued.num_queued > 20


def test_drafts_under_a_grammar() -> None:
    """What it forces is verified in a captured step, while the step before is on its way."""
    requests = [
        Request(
            request_id=number,
            external_id=str(number),
            prompt_token_ids=tuple(prompt_of(10 + number, 2000, seed=number)),
            sampling=SamplingParams(max_tokens=60, temperature=0.5 * (number % 3), seed=number),
            grammar=GRAMMAR if number % 2 else None,
        )
        for number in range(1, 7)
    ]
    found = []
    for speculation, overlap in ((SpeculationConfig(), False), (SpeculationConfig(), True), (LOOK_UP, True)):
        options = {"max_model_len": 256, "max_num_seqs": 8}
        watched = Watched(opened(BUNDLED, speculation=speculation, **options), overlap, 1 << 20)
        watched.run(requests)
        found.append([watched.tokens(request.request_id) for request in requests])
        assert watched.sum_of("accepted_tokens") > 10
        guided = [watched.reasons(request.request_id) for request in requests[::2]]
        assert [reason for ((_, reason, _),) in guided] == [FinishReason.STOP] * 3
    plain = Watched(open_runner(BUNDLED, max_model_len=256, **PLAIN), False, 1 << 20)
    plain.run(requests)
    assert found == [[plain.tokens(request.request_id) for request in requests]] * 3


def test_budgets_of_thoughts_hold_while_steps_are_queued() -> None:
    """Near its end a thought waits for masks, and before and afterwards for nothing."""
    tags = ThinkingTags(open_id=14, close_id=15, opened=True, line_breaks=(214, 418), blank_line=(418,))
    requests = [
        Request(
            request_id=number,
            external_id=str(number),
            prompt_token_ids=tuple(prompt_of(9, 2000, seed=number) * 3 + [214]),
            thinking=tags if number % 4 else None,
            sampling=SamplingParams(
                max_tokens=42,
                temperature=0.5 * (number % 3),
                seed=number,
                logit_bias={15: -100.0},
                max_thinking_tokens=2 + 3 * number if number % 4 else None,
            ),
        )
        for number in range(1, 13)
    ]
    plain = Watched(open_runner(BUNDLED, max_model_len=256, **PLAIN), False, 1 << 20)
    plain.run(requests)
    expected = [plain.tokens(request.request_id) for request in requests]
    for request, tokens in zip(requests, expected, strict=True):
        assert len(tokens) == 42
        if (budget := request.sampling.max_thinking_tokens) is not None:
            assert budget - 1 <= tokens.index(15) + 1 <= budget
            assert tokens[tokens.index(15) + 1] == 418
        else:
            assert 15 not in tokens
    for speculation, overlap in ((SpeculationConfig(), False), (SpeculationConfig(), True), (LOOK_UP, True)):
        runner = opened(BUNDLED, speculation=speculation, max_model_len=256, max_num_seqs=12)
        watched = Watched(runner, overlap, 1 << 20)
        watched.run(requests)
        assert [watched.tokens(request.request_id) for request in requests] == expected
        assert bool(watched.num_queued) is overlap


def test_a_draft_models_tokens_are_verified_by_captured_steps(folder: Path) -> None:
    speculation = SpeculationConfig(method="draft_model", draft_model=str(folder), min_acceptance=0.0)
    recorder = CheckedRecorder()
    runner = opened(folder, speculation=speculation, recorder=recorder, max_num_seqs=8)
    requests = requests_of(5, 6)
    drafted = Watched(runner, False, 1 << 20)
    drafted.run(requests)
    plain = Watched(open_runner(folder, **PLAIN), False, 1 << 20)
    plain.run(requests)
    for request in requests:
        assert drafted.tokens(request.request_id) == plain.tokens(request.request_id)
    # The target is its own draft.
    assert drafted.sum_of("accepted_tokens") > 0.9 * drafted.sum_of("drafted_tokens") > 50
    assert sum(recording.num_replays for recording in recorder.recordings) > 20


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_device_accepts_what_the_host_accepts(data: st.DataObject) -> None:
    drafts = data.draw(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=5))
    starts = np.concatenate(([0], np.cumsum([len(each) + 1 for each in drafts])))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=int(starts[-1]), max_size=int(starts[-1])))
    empty = np.zeros(tokens and len(tokens), np.int64)
    rows = LogitRows(
        members=list(range(len(drafts))), starts=starts.tolist(), tokens=empty, slots=empty, positions=empty
    )
    scheduled = [ScheduledSequence(0, 0, 1 + len(each), (), True, tuple(each)) for each in drafts]
    found = accept(torch.tensor(tokens), cast(StepInputs, SimpleNamespace(scheduled=scheduled)), rows)
    for member, each in enumerate(drafts):
        start, end = starts[member], starts[member + 1]
        emitted = tokens[start : start + 1 + num_confirmed(tuple(each), tokens[start:end])]
        assert found.num_rejected[member] == len(each) + 1 - len(emitted)
        assert tokens[found.last_rows[member]] == emitted[-1]
        assert found.last_rows[member] - found.first_rows[member] == len(emitted) - 1
        assert found.emitted[start:end].tolist() == [place < len(emitted) for place in range(end - start)]
