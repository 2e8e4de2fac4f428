"""Budgets of thoughts, on the bundled model with the real scheduler and runner: never passed, and the answer
follows, whatever else happens to a sequence.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from contract.chat import JsonSchemaFormat
from contract.thinking import ThinkingTags
from engine.config import CacheConfig, SchedulerConfig
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.speculation_config import SpeculationConfig
from engine.types import FinishReason, GrammarSpec, Request, SamplingParams
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.driver import open_runner
from tests.unit.tokenizer_svc.test_grammars import Family
from tokenizer_svc.grammar.request import Built, GrammarRequest, Reasoning

BUNDLED = Path("models/millrace-nano")
TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
OPEN, CLOSE, BREAK, BLANK, END = (
    TOKENIZER.token_to_id(each) for each in ("<think>", "</think>", "Ċ", "ĊĊ", "<|im_end|>")
)
NUM_REQUESTS = 200
# The model neither closes its thought nor ends its answer by itself.
NEVER = {CLOSE: -100.0, END: -100.0}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ready": {"type": "boolean"}},
    "required": ["name", "ready"],
    "additionalProperties": False,
}
Outputs = dict[tuple[int, int], list[int]]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def request_of(number: int, **options: Any) -> Request:
    """One of a mix: budgets, seeds and greedy draws, thoughts that the prompt or the model has begun."""
    draw = random.Random(number)
    budget, opened = draw.randint(2, 40), number % 2 == 0
    sampling = {
        "max_thinking_tokens": budget,
        "max_tokens": budget + 8,
        "temperature": draw.choice([0.0, 0.9, 1.5]),
        "seed": number,
        "logit_bias": NEVER,
        "frequency_penalty": draw.choice([0.0, 0.4]),
        **options.pop("sampling", {}),
    }
    begun = "<think>\n" if opened else ""
    prompt = ids_of(
        f"<|im_start|>user\nWhat is {number} plus {number}?<|im_end|>\n<|im_start|>assistant\n{begun}"
    )
    given: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "thinking": ThinkingTags(
            open_id=OPEN, close_id=CLOSE, opened=opened, line_breaks=(BREAK, BLANK), blank_line=(BLANK,)
        ),
        # Its own opening, as an engine that was lost has drawn it.
        "output_token_ids": () if opened else (OPEN, BREAK),
        **options,
    }
    return Request(request_id=number, external_id=str(number), sampling=SamplingParams(**sampling), **given)


def run(
    runner: ModelRunner, requests: list[Request], urgent: Sequence[Request] = (), *, num_blocks: int = 0
) -> tuple[Outputs, int]:
    """Outputs by request and choice, what was there before included; and how often somebody was preempted.
    The urgent ones come when the others run.
    """
    memory = memory_plan(num_blocks or runner.storage.num_blocks, runner.storage.block_size, 512)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=48), CacheConfig(), memory, model="m")
    outputs: Outputs = {
        (each.request_id, index): list(each.output_token_ids)
        for each in (*requests, *urgent)
        for index in range(each.sampling.n)
    }
    for each in requests:
        scheduler.submit(each, 0.0)
    num_steps = num_preempted = 0
    while scheduler.has_work:
        num_steps += 1
        if num_steps == 12:
            for each in urgent:
                scheduler.submit(each, 0.0)
        scheduler.update(runner.launch(scheduler.schedule(0.0)).wait(), 0.0)
        for event in scheduler.drain_events():
            assert event.failure is None, event.failure
            if event.withheld_tokens:
                continue
            outputs[event.request_id, event.choice_index] += event.token_ids
            if event.finish_reason is not None:
                assert event.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
                assert event.statistics is not None
                num_preempted += event.statistics.num_preemptions
    scheduler.check_invariants()
    assert runner.num_states() == 0
    return outputs, num_preempted


def check(requests: list[Request], outputs: Outputs) -> None:
    """Every thought is within its budget and closed as the family does it; the rest is the answer."""
    by_id = {each.request_id: each for each in requests}
    for (number, _), output in outputs.items():
        request, sampling = by_id[number], by_id[number].sampling
        assert sampling.max_thinking_tokens is not None
        opened = request.prompt_token_ids[-2:] == ids_of("<think>\n")
        begun = output if opened else output[1:]
        assert CLOSE in begun, f"request {number} thinks to its end"
        thought = begun[: begun.index(CLOSE) + 1]
        assert len(thought) <= sampling.max_thinking_tokens
        if not sampling.beam_width:
            # Beams rank what the model itself would write, its own end of the thought included.
            before = (*request.prompt_token_ids, *begun[: len(thought) - 1])
            assert (before[-1], begun[len(thought)]) == (BREAK, BLANK)
            # A line break that is there already is not written again, and saves one.
            assert request.grammar or len(thought) >= sampling.max_thinking_tokens - 1
        if request.grammar is None:
            assert len(output) == sampling.max_tokens, "the answer is there, as long as it may be"


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    with closing(open_runner(BUNDLED, kv_cache_bytes=64 << 20)) as runner:
        yield runner


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> Outputs:
    requests = [request_of(number) for number in range(NUM_REQUESTS)]
    outputs, _ = run(runner, requests)
    check(requests, outputs)
    return outputs


def test_two_hundred_mixed_budgets_hold_and_nobody_changes_anybody(
    runner: ModelRunner, plain: Outputs
) -> None:
    assert len(plain) == NUM_REQUESTS
    for number in range(0, NUM_REQUESTS, 17):
        alone, _ = run(runner, [request_of(number)])
        assert alone[number, 0] == plain[number, 0]


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_what_was_closed_by_force_is_not_closed_again(method: str) -> None:
    """By a model that comes to its own end of the thought later."""
    speculation = SpeculationConfig(method=method, min_ngram=1, min_acceptance=0.0)
    wants_to = {"logit_bias": {CLOSE: 12.0, END: -100.0}, "temperature": 0.0, "frequency_penalty": 0.0}
    with closing(open_runner(BUNDLED, speculation=speculation, kv_cache_bytes=64 << 20)) as runner:
        requests = [
            request_of(number, sampling={**wants_to, "max_thinking_tokens": 3, "max_tokens": 80})
            for number in range(24)
        ]
        free = [
            request_of(number, sampling={**wants_to, "max_thinking_tokens": 70, "max_tokens": 80})
            for number in range(100, 124)
        ]
        outputs, _ = run(runner, requests + free)
    counts = {number: output.count(CLOSE) for (number, _), output in outputs.items()}
    assert {counts[each.request_id] for each in requests} == {1}
    # It wants to, where nobody has closed anything for it.
    assert max(counts[each.request_id] for each in free) > 1


def test_preemption_leads_to_the_same_place(runner: ModelRunner, plain: Outputs) -> None:
    requests = [request_of(number) for number in range(30)]
    urgent = [request_of(number, priority=9) for number in range(30, 60)]
    outputs, num_preempted = run(runner, requests, urgent, num_blocks=100)
    assert num_preempted > 5
    assert outputs == {key: plain[key] for key in outputs}


def test_another_engine_goes_on_from_every_place(runner: ModelRunner, plain: Outputs) -> None:
    number = next(each for each in range(60) if len(plain[each, 0]) < 24)
    whole = plain[number, 0]
    for cut in range(2, len(whole)):
        again, _ = run(runner, [request_of(number, output_token_ids=tuple(whole[:cut]))])
        assert again[number, 0] == whole


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "lookahead"])
def test_drafts_do_not_pass_a_budget(method: str, plain: Outputs) -> None:
    speculation = SpeculationConfig(method=method, draft_model=str(BUNDLED), min_ngram=1, min_acceptance=0.0)
    with closing(open_runner(BUNDLED, speculation=speculation, kv_cache_bytes=64 << 20)) as runner:
        requests = [request_of(number) for number in range(60)]
        outputs, _ = run(runner, requests)
    assert outputs == {key: plain[key] for key in outputs}


def test_choices_and_beams_keep_it_each(runner: ModelRunner) -> None:
    several = {"n": 3, "best_of": 3, "temperature": 1.2}
    beams = {"n": 3, "best_of": 3, "beam_width": 3, "temperature": 0.0, "frequency_penalty": 0.0}
    requests = [
        request_of(number, output_token_ids=(), sampling=several if number % 4 else beams)
        for number in range(0, 24, 2)
    ]
    outputs, _ = run(runner, requests)
    assert len(outputs) == 36
    check(requests, outputs)


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_the_way_to_an_answer_of_its_own_is_forced_whole(method: str) -> None:
    """Messages as harmony has them, of this vocabulary's words."""
    start, role, channel, analysis, message, final = ids_of("a b c d e f")[:6]
    header, answer = (channel, analysis, message), (start, role, channel, final, message)
    tags = ThinkingTags(
        open_id=channel,
        open_rest=(analysis, message),
        close_id=CLOSE,
        opened=False,
        lead=(start, role),
        answer=answer,
        other_ends=(start,),
    )
    never = dict.fromkeys((CLOSE, END, start, channel), -100.0)
    speculation = SpeculationConfig(method=method, min_ngram=1, min_acceptance=0.0)
    with closing(open_runner(BUNDLED, speculation=speculation, kv_cache_bytes=64 << 20)) as runner:
        requests = [
            request_of(
                number,
                thinking=tags,
                output_token_ids=header,
                sampling={"logit_bias": never, "max_tokens": 60},
            )
            for number in range(12)
        ]
        outputs, _ = run(runner, requests)
    for (number, _), output in outputs.items():
        budget = requests[number].sampling.max_thinking_tokens
        assert budget is not None
        assert output.index(CLOSE) == len(header) + budget - 1
        behind = len(header) + budget
        assert tuple(output[behind : behind + len(answer)]) == answer
        assert not {CLOSE, start, channel} & set(output[behind + len(answer) :])
        assert len(output) == 60


@pytest.fixture(scope="module")
def grammars() -> dict[bool, GrammarSpec]:
    """The tokenizer service's, by whether the prompt has begun the thought that comes before the answer."""
    family, found = Family.at(BUNDLED), {}
    for opened in (True, False):
        built = family.build(
            GrammarRequest(
                response_format=JsonSchemaFormat(schema_json=json.dumps(SCHEMA)),
                reasoning=Reasoning.OPEN if opened else Reasoning.OPTIONAL,
            )
        )
        assert isinstance(built, Built), built
        found[opened] = GrammarSpec(digest=str(opened), payload=built.payload, backend="llguidance/1")
    return found


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_the_grammar_begins_after_a_thought_that_was_closed(
    method: str, grammars: dict[bool, GrammarSpec]
) -> None:
    beams = {"n": 2, "best_of": 2, "beam_width": 2, "temperature": 0.0, "frequency_penalty": 0.0}
    requests = [
        request_of(
            number,
            grammar=grammars[number % 2 == 0],
            sampling={
                "max_tokens": 120,
                "stop_token_ids": (END,),
                "logit_bias": {CLOSE: -100.0},
                **(beams if number % 10 == 0 else {}),
            },
        )
        for number in range(40)
    ]
    requests = [
        each
        for each in requests
        if each.sampling.max_thinking_tokens and each.sampling.max_thinking_tokens > 6
    ]
    speculation = SpeculationConfig(method=method, min_ngram=1, min_acceptance=0.0)
    with closing(open_runner(BUNDLED, speculation=speculation, kv_cache_bytes=64 << 20)) as runner:
        outputs, _ = run(runner, requests)
    check(requests, outputs)
    for output in outputs.values():
        answer = output[output.index(CLOSE) + 1 :]
        said = json.loads(TOKENIZER.decode([token for token in answer if token != END]))
        assert said.keys() == {"name", "ready"}
