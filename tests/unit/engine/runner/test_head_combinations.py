"""Answers with drafts of a head, or of lookahead, are those without, bit by bit, whatever else is asked of
them: by the real scheduler and runner, in one batch of greedy and sampled requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers

from contract.retention import Retention
from engine.config import AdaptersConfig, CacheConfig, SchedulerConfig
from engine.runner.base import PendingStep
from engine.runner.runner import ModelRunner
from engine.runner.speculation.head import HeadDrafter
from engine.scheduler import Scheduler
from engine.speculation_config import SpeculationConfig
from engine.types import FinishReason, Request, TokenEvent, TokenLogprobs
from services.drafter.lessons import Lesson
from tests.unit.engine.adapters.test_merged import load
from tests.unit.engine.adapters.written import write_adapter
from tests.unit.engine.core.test_thinking_budgets import request_of as thinking
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.drafting import (
    BUNDLED,
    GRAMMAR,
    HEAD_DIM,
    NUM_LAYERS,
    SAMPLINGS,
    TREE,
    guided_by,
    poison_head,
    speculating,
    totals,
)
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.engine.runner.predicting import make_predicting, predicting_speculation
from tests.unit.engine.service.test_spans import spans_of

BLOCK = 4
NUM_TOKENS = 36
# The step before which late requests come.
LATE_STEP = 9
CHOOSING = {"type": "array", "items": {"enum": [1, 20, 300, 4000, 50_000]}, "minItems": 12, "maxItems": 14}


@dataclass
class ServedAnswer:
    """All that one choice told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass
class ServedAnswers:
    """By request and choice; and what it took."""

    answers: dict[tuple[int, int], ServedAnswer] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0
    num_cached: int = 0
    events: dict[int, list[TokenEvent]] = field(default_factory=dict)


def serve(
    runner: ModelRunner,
    requests: Sequence[Request],
    late: Sequence[Request] = (),
    *,
    num_blocks: int = 0,
    overlap: bool = False,
    max_num_seqs: int = 16,
) -> ServedAnswers:
    """Computes requests; the late ones come when the others run."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=64, long_prefill_tokens=32, max_num_seqs=max_num_seqs),
        CacheConfig(prefix_caching=True),
        memory_plan(num_blocks or runner.storage.num_blocks, runner.storage.block_size, 256),
        model="m",
    )
    for each in requests:
        scheduler.submit(each, 0.0)
    served, step = ServedAnswers(), 0
    pending: deque[PendingStep] = deque()
    while scheduler.has_work or pending:
        step += 1
        if step == LATE_STEP:
            for each in late:
                scheduler.submit(each, 5.0)
        plan = scheduler.schedule(10.0)
        launched = bool(plan.scheduled or plan.released)
        if launched:
            pending.append(runner.launch(plan))
        while len(pending) > (overlap and launched):
            scheduler.update(pending.popleft().wait(), 10.0)
        scheduler.check_invariants()
        take_in(scheduler, served)
    assert step > LATE_STEP or not late
    assert runner.num_states() == 0
    assert scheduler.num_unreferenced_blocks == scheduler.num_total_blocks
    return served


def take_in(scheduler: Scheduler, served: ServedAnswers) -> None:
    for event in scheduler.drain_events():
        assert event.failure is None, event.failure
        if event.withheld_tokens:
            continue
        served.events.setdefault(event.request_id, []).append(event)
        answer = served.answers.setdefault((event.request_id, event.choice_index), ServedAnswer())
        answer.tokens += event.token_ids
        answer.logprobs += event.logprobs
        if event.first_token is not None:
            served.num_cached += event.first_token.cached_prompt_tokens
        if event.finish_reason is not None:
            answer.reason, answer.stop_token_id = event.finish_reason, event.stop_token_id
            assert event.statistics is not None
            served.num_drafted += event.statistics.drafted_tokens
            served.num_accepted += event.statistics.accepted_tokens
            served.num_preempted += event.statistics.num_preemptions


def request_of(number: int, prompt: Sequence[int], **options: Any) -> Request:
    """One of a mix of greedy and sampled ones."""
    asked = options.pop("sampling", {})
    values = {"max_tokens": NUM_TOKENS, "logprobs": 2} | asked
    return Request(
        request_id=number,
        external_id=str(number),
        prompt_token_ids=tuple(prompt),
        sampling=msgspec.structs.replace(SAMPLINGS[number % 3], **values),
        **options,
    )


def requests_of(lessons: list[Lesson], *, first: int = 0, **options: Any) -> list[Request]:
    return [
        request_of(first + number, lesson.ids[: lesson.num_given], **options)
        for number, lesson in enumerate(lessons)
    ]


METHODS = ["eagle3", "medusa", "lookahead", "eagle3 tree", "medusa tree"]


def speculation_of(method: str, head: Callable[[str], Path]) -> SpeculationConfig:
    """Drafts of a method whether they pay or not; only heads have a folder, and drafts that are a tree."""
    if method == "lookahead":
        return SpeculationConfig(method="lookahead", min_acceptance=0.0, num_draft_tokens=3)
    kind, _, is_tree = method.partition(" ")
    tree = TREE if is_tree else ()
    return predicting_speculation(tree=tree) if kind == "mtp" else speculating(head(kind), tree=tree)


@pytest.fixture(scope="module", params=[*METHODS, "mtp", "mtp tree"])
def head(request: Any, trained_head: Callable[..., Path]) -> SpeculationConfig:
    return speculation_of(request.param, trained_head)


@pytest.fixture(scope="module")
def folder(
    head: SpeculationConfig,
    target_folder: Path,
    target_oracle: transformers.PreTrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The model that drafts are for; where they are those of a layer of its own, one of the same sizes."""
    if head.method != "mtp":
        return target_folder
    made = tmp_path_factory.mktemp("predicting")
    make_predicting(made, "qwen2", echo=0.3, num_hidden_layers=NUM_LAYERS, head_dim=HEAD_DIM)
    return made


def opened(
    folder: Path, head: SpeculationConfig | None, *, cache: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A runner with or without drafts, closed behind its block."""
    if head is not None:
        options["speculation"] = head
    runner = open_runner(folder, cache={"block_size": BLOCK} | (cache or {}), **options)
    if head is not None and head.method != "lookahead":
        poison_head(runner)
    return closing(runner)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[ModelRunner]:
    with opened(folder, None) as runner:
        yield runner


@pytest.fixture(scope="module")
def drafting(folder: Path, head: SpeculationConfig) -> Iterator[ModelRunner]:
    with opened(folder, head) as runner:
        yield runner


def assert_equal(
    drafting: ModelRunner, plain: ModelRunner, requests: list[Request], *late: Request, **options: Any
) -> ServedAnswers:
    """The served answers with drafts, of which some held, are those without."""
    expected = serve(plain, requests, late, **options)
    found = serve(drafting, requests, late, **options)
    assert found.answers == expected.answers
    assert expected.num_drafted == 0
    assert found.num_drafted >= found.num_accepted > 0
    return found


def drafts_on_span(served: ServedAnswers, request_id: int) -> dict[str, tuple[int, int]]:
    """Proposed and accepted tokens by who proposed them, as the span of an answer says it that took long
    enough to have one.
    """
    events = [
        each
        if each.statistics is None
        else msgspec.structs.replace(each, statistics=msgspec.structs.replace(each.statistics, decode_s=1.0))
        for each in served.events[request_id]
    ]
    (span,) = spans_of(*events)["engine.decode"]
    found = {
        who: (
            span.attributes[f"millrace.drafted_tokens.{who}"],
            span.attributes[f"millrace.accepted_tokens.{who}"],
        )
        for who in span.attributes.get("millrace.drafters", ())
    }
    total = span.attributes["millrace.drafted_tokens"], span.attributes["millrace.accepted_tokens"]
    assert tuple(map(sum, zip((0, 0), *found.values(), strict=True))) == total
    return found


def test_the_span_of_an_answer_says_who_drafted_and_what_held(
    drafting: ModelRunner, plain: ModelRunner, lessons: list[Lesson]
) -> None:
    served = serve(drafting, requests_of(lessons))
    said = [drafts_on_span(served, number) for number in range(len(lessons))]
    method = drafting.proposer.config.method
    assert {who for each in said for who in each} == {method}
    assert sum(each[method][0] for each in said) == served.num_drafted
    assert sum(each[method][1] for each in said) == served.num_accepted > 0
    assert drafts_on_span(serve(plain, requests_of(lessons[:1])), 0) == {}


@pytest.mark.parametrize("overlap", [False, True])
def test_preempted_answers_go_on_with_drafts(
    drafting: ModelRunner, plain: ModelRunner, lessons: list[Lesson], overlap: bool
) -> None:
    """What is computed again is read again by the head, in another room."""
    late = requests_of(lessons[::-1], first=20, priority=9)
    found = assert_equal(
        drafting, plain, requests_of(lessons), *late, num_blocks=40, overlap=overlap, max_num_seqs=5
    )
    assert found.num_preempted > 2


def test_an_answer_goes_on_in_its_middle(
    drafting: ModelRunner, plain: ModelRunner, lessons: list[Lesson]
) -> None:
    """Where another engine was lost: wherever it had come, the rest is that of the whole answer."""
    whole = serve(plain, requests_of(lessons)).answers
    for cut in (1, 7, 20, NUM_TOKENS - 1):
        rest = [
            msgspec.structs.replace(each, output_token_ids=tuple(whole[each.request_id, 0].tokens[:cut]))
            for each in requests_of(lessons)
        ]
        found = serve(drafting, rest)
        assert found.answers == serve(plain, rest).answers
        for key, answer in found.answers.items():
            assert answer.tokens == whole[key].tokens[cut:]
        assert found.num_accepted > 0 or cut > 20


def test_a_prefix_of_another_request_is_behind_what_the_head_knows(
    drafting: ModelRunner, plain: ModelRunner, lessons: list[Lesson]
) -> None:
    prompts = [lesson.ids[:30] for lesson in lessons]
    first = [request_of(number, prompt) for number, prompt in enumerate(prompts)]
    again = [
        request_of(20 + number, [*prompt, *lessons[number].ids[30:34]])
        for number, prompt in enumerate(prompts)
    ]
    found = assert_equal(drafting, plain, first, *again)
    assert found.num_cached >= 24 * len(again)


def test_answers_end_in_the_middle_of_drafts_that_hold(
    drafting: ModelRunner, plain: ModelRunner, lessons: list[Lesson]
) -> None:
    """By length and by each token of the answer as the one that stops it, also where the first few do not."""
    whole = serve(plain, requests_of(lessons)).answers
    requests: list[Request] = []
    for number, lesson in enumerate(lessons):
        tokens, prompt = whole[number, 0].tokens, lesson.ids[: lesson.num_given]
        for place in range(2, 14):
            stopped = {"stop_token_ids": (tokens[place],), "min_tokens": place % 3 * 4}
            # A multiple of 3 keeps the sampling of the whole answer.
            at = number + 6 * len(requests)
            requests.append(request_of(at, prompt, sampling={"max_tokens": place}))
            requests.append(request_of(number + 6 * len(requests), prompt, sampling=stopped))
    found = assert_equal(drafting, plain, requests)
    reasons = [answer.reason for answer in found.answers.values()]
    assert reasons.count(FinishReason.LENGTH) >= len(requests) // 2
    assert reasons.count(FinishReason.STOP) > len(requests) // 4


def test_choices_draft_each_for_itself_and_beams_do_not(
    drafting: ModelRunner, plain: ModelRunner, lessons: list[Lesson]
) -> None:
    several, beams = {"n": 3, "best_of": 3}, {"n": 2, "best_of": 3, "beam_width": 3, "temperature": 0.0}
    ranked = {"n": 1, "best_of": 2}
    requests = requests_of(lessons, sampling=several) + requests_of(lessons[:3], first=30, sampling=ranked)
    found = assert_equal(drafting, plain, requests, *requests_of(lessons[:2], first=60, sampling=beams))
    assert len(found.answers) == 18 + 3 + 4
    searched = requests_of(lessons[:2], sampling={**beams, "frequency_penalty": 0.0})
    alone = serve(drafting, searched)
    assert alone.answers == serve(plain, searched).answers
    assert alone.num_drafted == 0


def test_answers_that_forget_look_at_the_same_blocks(
    drafting: ModelRunner, plain: ModelRunner, lessons: list[Lesson]
) -> None:
    keeps = [
        Retention(policy="window+sinks", window_tokens=1),
        Retention(policy="window+sinks", keep=0.4),
        None,
    ]
    long = {"sampling": {"max_tokens": 60}}
    requests = [
        request_of(number, lesson.ids[: 9 + 5 * number], retention=keeps[number % 3], **long)
        for number, lesson in enumerate(lessons)
    ]
    requests += [
        request_of(20 + number, lesson.ids[: 9 + 5 * number], retention=keeps[(number + 1) % 3], **long)
        for number, lesson in enumerate(lessons)
    ]
    found = assert_equal(drafting, plain, requests)
    whole = serve(plain, [msgspec.structs.replace(each, retention=None) for each in requests])
    assert whole.answers != found.answers
    # Also where forgotten blocks belong to others, or to nobody.
    assert_equal(drafting, plain, requests, num_blocks=70, max_num_seqs=5)


@pytest.mark.parametrize("kind", ["int8", "fp8", "kivi4"])
def test_keys_and_values_of_few_bits_are_those_without_drafts(
    target_folder: Path, trained_head: Callable[..., Path], lessons: list[Lesson], kind: str
) -> None:
    """Also those of a head itself, and of branches; of a layer that keeps the model's own, too."""
    cache = {"kv_dtype": kind, "kv_dtype_layers": {"0": "auto"}}
    if kind == "kivi4":
        cache["block_size"] = 64
    with opened(target_folder, None, cache=cache) as plain:
        for method in ("eagle3", "lookahead", "eagle3 tree"):
            with opened(target_folder, speculation_of(method, trained_head), cache=cache) as drafting:
                assert_equal(drafting, plain, requests_of(lessons))
                # Beyond the end of a block, whatever its size.
                longer = [request_of(number, lesson.ids[:45]) for number, lesson in enumerate(lessons)]
                assert_equal(drafting, plain, longer)


def test_newest_keys_of_a_head_stay_with_their_blocks(
    target_folder: Path, trained_head: Callable[..., Path]
) -> None:
    """When the oldest blocks of its room make place, one or several."""
    cache = {"kv_dtype": "kivi4", "block_size": 64}
    with opened(target_folder, speculation_of("eagle3", trained_head), cache=cache) as runner:
        drafter = runner.proposer.drafter
        assert isinstance(drafter, HeadDrafter)
        room, size = np.array([0]), runner.storage.block_size

        def places() -> dict[int, int]:
            """By block of the room: which row of whole keys is its own."""
            row = int(drafter.storage.recent_rows(room, drafter.gone[room])[0])
            blocks = drafter.blocks[0, : -(-int(drafter.held[0]) // size)].tolist()
            return {block: row ^ index & 1 for index, block in enumerate(blocks)}

        for num_new in (20, 100, 150):
            drafter.held[0] = drafter.rooms.num_blocks * size - 10
            before = places()
            drafter.make_place(0, num_new)
            after = places()
            assert 0 < len(after) < len(before)
            assert after == {block: before[block] for block in after}


def test_rows_with_adapters_draft_beside_those_without(
    folder: Path,
    head: SpeculationConfig,
    target_oracle: transformers.PreTrainedModel,
    lessons: list[Lesson],
    tmp_path: Path,
) -> None:
    """The head knows no adapters: it drafts worse for such rows, and changes none of them."""
    for index in range(2):
        write_adapter(tmp_path / f"a{index}", target_oracle, r=4, seed=index, lora_alpha=1 + index)
    config = AdaptersConfig(paths={f"a{index}": str(tmp_path / f"a{index}") for index in range(2)})

    def jobs(*, speculate: bool) -> list[Job]:
        return [
            Job(
                list(lesson.ids[: lesson.num_given]),
                num_tokens=30,
                sampling=SAMPLINGS[index % 3],
                adapter_slot=index % 3 - 1,
                speculate=speculate,
            )
            for index, lesson in enumerate([*lessons, *lessons[::-1]])
        ]

    with opened(folder, None, adapters=config) as plain, opened(folder, head, adapters=config) as drafting:
        load(plain, "a0", "a1")
        load(drafting, "a0", "a1")
        expected = Driver(plain, seed=1).run(jobs(speculate=False))
        found = Driver(drafting, seed=2).run(jobs(speculate=True))
    for one, other in zip(expected, found, strict=True):
        assert other.output[:30] == one.output
        assert other.logprobs[: len(one.logprobs)] == one.logprobs
    for slot in (-1, 0, 1):
        assert totals([job for job in found if job.adapter_slot == slot])[0] > 0
    assert totals(found)[1] > 0


@pytest.mark.parametrize("method", [*METHODS[:3], "medusa tree"])
def test_drafts_of_a_head_and_tokens_that_a_grammar_forces_take_turns(method: str) -> None:
    """Of one answer some are forced and some are drafted; beside thoughts that are held to a budget, in steps
    that are overlapped, and where an answer goes on in its middle. The heads are those of the bundled model.
    """
    prompts = [prompt_of(10, 2000, seed=index) for index in range(6)]
    grammars = [GRAMMAR, guided_by(CHOOSING)]

    def requests(*, sampled: bool = True) -> list[Request]:
        changes: dict[str, Any] = {} if sampled else {"temperature": 0.0}
        return [
            request_of(
                number,
                prompt,
                grammar=grammars[number % 2],
                sampling={"max_tokens": 90, "stop_token_ids": (2,), **changes},
            )
            for number, prompt in enumerate(prompts)
        ]

    head = speculation_of(method, lambda method: BUNDLED.with_name(f"millrace-nano-{method}"))
    with (
        opened(BUNDLED, None, max_model_len=1024) as plain,
        opened(BUNDLED, head, max_model_len=1024) as drafting,
    ):
        late = [thinking(number) for number in range(30, 42)]
        found = [
            assert_drafts_beside_forced_tokens(drafting, plain, requests(sampled=sampled), late)
            for sampled in (True, False)
        ]
        whole = serve(plain, requests()).answers
        rest = [
            msgspec.structs.replace(each, output_token_ids=tuple(whole[each.request_id, 0].tokens[:9]))
            for each in requests()
        ]
        assert serve(drafting, rest).answers == serve(plain, rest).answers
    assert all(found)


def assert_drafts_beside_forced_tokens(
    drafting: ModelRunner, plain: ModelRunner, requests: list[Request], late: list[Request]
) -> bool:
    """Forced tokens are proposed by both; whether the head's drafts came to them and held."""
    expected = serve(plain, requests, late)
    found = serve(drafting, requests, late)
    assert found.answers == expected.answers
    assert serve(drafting, requests, late, overlap=True).answers == expected.answers
    assert expected.num_accepted == expected.num_drafted > 0
    said, method = (
        [drafts_on_span(found, each.request_id) for each in requests],
        drafting.proposer.config.method,
    )
    assert {who for each in said for who in each} == {"grammar", method}
    forced = [drafts_on_span(expected, each.request_id) for each in requests]
    assert {who for each in forced for who in each} == {"grammar"}
    return sum(each.get(method, (0, 0))[1] for each in said) > 0
