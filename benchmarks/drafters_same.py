"""Whether drafts change any answer: mixed requests, answered with and without, compared bit by bit.

    python -m benchmarks.drafters_same --requests 2000

Each request draws its options by chance, the same for all methods: greedy or sampled with a seed, filters,
penalties, biases, logprobs of output and prompt, several choices, the best of several, beams, tokens that
stop, a least length, a grammar, an adapter, what its answer forgets, tenant and priority; some clients go
away in the middle. Memory is scarce, so answers are preempted and go on. Drafts are verified whether they pay
or not. One engine without drafts, then one for each method, all in this process with loop, scheduler and
runner as they serve. What differs is named by its request, and the exit code says whether anything does. Of a
client that went away, what both engines told is compared.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import llguidance

from benchmarks.drafters import prompts_of
from benchmarks.engine.report import options, publish
from benchmarks.in_process import Mailbox
from contract.retention import Retention
from engine.config import AdaptersConfig, CacheConfig, EngineConfig, SchedulerConfig, adapters_beside
from engine.core import messages
from engine.core.__main__ import make_scheduler
from engine.core.loop import EngineLoop
from engine.runner.build import build_here
from engine.speculation_config import SpeculationConfig
from engine.types import FinishReason, GrammarSpec, Request, SamplingParams, TokenEvent, TokenLogprobs
from runtime.config import ModelConfig
from services.supervisor.config import BUNDLED_MODEL

OFF = "off"
_HEADS = {"eagle3": "models/millrace-nano-eagle3", "medusa": "models/millrace-nano-medusa"}
_DRAFT_MODEL = {"draft_model": "models/millrace-nano-draft"}
_TREE = ((1, 0, 0), (1, 1), (2,), (0, 1), (0, 0, 1))
# Longest text; memory for about five of those; and requests that are there at the same time.
_MOST_TOKENS, _CACHE_BYTES, _RUNNING, _WAITING = 640, 10 << 20, 12, 24
_SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 12},
        "birthday": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog", "guinea pig"]},
    },
    "required": ["full_name", "birthday", "kind"],
    "additionalProperties": False,
}
_POLICIES = (
    Retention(policy="window+sinks", keep=0.5),
    Retention(policy="snapkv", keep=0.5),
    Retention(policy="h2o", keep=0.6),
    Retention(policy="window+sinks", keep=0.3, max_lost=0.2),
)


@dataclass
class _ToldAnswer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: tuple[Any, ...] = ()

    def begins_as(self, other: _ToldAnswer, *, is_whole: bool) -> bool:
        """Whether both are the same, or where their client went away, as far as both go."""
        if is_whole:
            return self == other
        length, num_scored = (
            min(map(len, each)) for each in ((self.tokens, other.tokens), (self.logprobs, other.logprobs))
        )
        told = self.tokens[:length], self.logprobs[:num_scored]
        return told == (other.tokens[:length], other.logprobs[:num_scored])


@dataclass
class DraftedAnswers:
    """What an engine told, by request and choice; and what it took."""

    answers: dict[tuple[int, int], _ToldAnswer] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0

    def note(self, event: TokenEvent) -> None:
        if event.withheld_tokens:
            return
        answer = self.answers.setdefault((event.request_id, event.choice_index), _ToldAnswer())
        answer.tokens += event.token_ids
        answer.logprobs += event.logprobs
        answer.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            failure = None if event.failure is None else event.failure.reason
            answer.end = event.finish_reason, event.stop_token_id, failure
            if event.statistics is not None:
                self.num_drafted += event.statistics.drafted_tokens
                self.num_accepted += event.statistics.accepted_tokens
                self.num_preempted += event.statistics.num_preemptions


def _sampling(draw: random.Random, vocab: int) -> dict[str, Any]:
    """How tokens are drawn, and when they end."""
    found: dict[str, Any] = {"max_tokens": draw.randint(4, 56), "temperature": 0.0}
    if draw.random() < 0.6:
        found |= {"temperature": draw.choice((0.3, 0.8, 1.2)), "seed": draw.randrange(2**63)}
        found |= draw.choice(
            ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9})
        )
    if draw.random() < 0.3:
        found |= {"presence_penalty": draw.uniform(-1, 1), "frequency_penalty": draw.uniform(-1, 1)}
    if draw.random() < 0.2:
        found["repetition_penalty"] = draw.uniform(0.9, 1.3)
    if draw.random() < 0.1:
        found["logit_bias"] = {draw.randrange(vocab): draw.uniform(-5, 5) for _ in range(4)}
    if draw.random() < 0.4:
        found["logprobs"] = draw.choice((0, 1, 5))
    if draw.random() < 0.05:
        found["prompt_logprobs"] = 2
    if draw.random() < 0.3:
        found["stop_token_ids"] = (2, *(draw.randrange(vocab) for _ in range(12)))
    if draw.random() < 0.2:
        found["min_tokens"] = draw.randint(1, 4)
    return found


def mixed_requests(prompts: Sequence[tuple[int, ...]], number: int, seed: int, vocab: int) -> list[Request]:
    """So many, drawn by chance; which adapters there are is the bundled model's."""
    draw, found = random.Random(seed), []
    payload = llguidance.LLMatcher.grammar_from_json_schema(_SCHEMA, {"whitespace_flexible": False})
    grammar = GrammarSpec(digest="", payload=payload.encode(), backend="llguidance/1")
    for request_id in range(number):
        sampling, beside = _sampling(draw, vocab), dict[str, Any]()
        kind = draw.random()
        if kind < 0.15:
            beside["grammar"] = grammar
        elif kind < 0.3:
            beside["retention"] = draw.choice(_POLICIES)
        elif kind < 0.4:
            several = draw.randint(2, 4)
            sampling |= {"n": draw.randint(1, several), "best_of": several}
        elif kind < 0.43:
            sampling = {
                "max_tokens": sampling["max_tokens"],
                "temperature": 0.0,
                "n": 2,
                "best_of": 3,
                "beam_width": 3,
            }
        elif kind < 0.55:
            beside["adapter"] = draw.choice(("pirate", "entries"))
        request = Request(
            request_id=request_id,
            external_id=str(request_id),
            prompt_token_ids=draw.choice(prompts),
            sampling=SamplingParams(**sampling),
            tenant=draw.choice("abcd"),
            cache_salt=draw.choice((b"", b"x")),
            priority=draw.choice((0, 0, 0, 1, 2)),
            **beside,
        )
        found.append(request)
    return found


def gone_after(request: Request, seed: int) -> int:
    """Tokens behind which a request's client goes away; 0: it stays."""
    draw = random.Random(seed * 1_000_003 + request.request_id)
    return draw.randint(1, 20) if draw.random() < 0.12 else 0


def speculation_of(method: str) -> SpeculationConfig:
    """Of a method as it is called here, which drafts whether that pays or not."""
    kind, _, is_tree = method.partition(" ")
    values: dict[str, Any] = {"method": kind, "draft_model": (_HEADS | _DRAFT_MODEL).get(kind, "")}
    return SpeculationConfig(**values, min_acceptance=0.0, min_ngram=1, tree=_TREE if is_tree else ())


def answered(requests: Sequence[Request], method: str, seed: int) -> DraftedAnswers:
    """All requests by one engine, a few of which wait; those whose client goes away are cancelled."""
    config = EngineConfig(
        max_model_len=_MOST_TOKENS,
        cache=CacheConfig(kv_cache_bytes=_CACHE_BYTES, forgotten_bytes=1 << 20),
        scheduler=SchedulerConfig(max_num_seqs=_RUNNING, max_num_batched_tokens=256),
        speculation=SpeculationConfig() if method == OFF else speculation_of(method),
        adapters=AdaptersConfig(paths=adapters_beside(str(BUNDLED_MODEL))),
    )
    config.validate()
    given, told, mailbox = ModelConfig(path=str(BUNDLED_MODEL)), DraftedAnswers(), Mailbox()
    waiting, open_choices = deque(requests), dict[int, int]()
    leaving = {each.request_id: gone_after(each, seed) for each in requests}

    def listen(event: TokenEvent) -> None:
        told.note(event)
        if event.finish_reason is not None:
            open_choices[event.request_id] -= 1
            if not open_choices[event.request_id] or event.failure is not None:
                del open_choices[event.request_id]
        elif leaving[event.request_id]:
            known = told.answers.get((event.request_id, event.choice_index))
            if known is not None and len(known.tokens) >= leaving[event.request_id]:
                leaving[event.request_id] = 0
                mailbox.commands.append(messages.Cancel(event.request_id))

    mailbox.listener = listen
    with ExitStack() as stack:
        runner, memory, facts = build_here(config, given, lambda stage, part: None)
        stack.callback(runner.close)
        scheduler = make_scheduler(config, given, memory, facts, adapters=runner.adapters)
        loop = EngineLoop(scheduler, runner, mailbox)
        while waiting or open_choices:
            while waiting and len(open_choices) < _WAITING:
                request = waiting.popleft()
                open_choices[request.request_id] = request.sampling.n
                mailbox.commands.append(messages.Submit(request))
            loop.step()
        scheduler.check_invariants()
    return told


def different(
    found: DraftedAnswers, plain: DraftedAnswers, requests: Sequence[Request], seed: int
) -> list[str]:
    """Requests and choices that are not the same."""
    wrong = []
    for key in sorted(found.answers.keys() | plain.answers.keys()):
        ours, off = found.answers.get(key, _ToldAnswer()), plain.answers.get(key, _ToldAnswer())
        ended = {FinishReason.CANCELLED} & {answer.end[0] for answer in (ours, off) if answer.end}
        if not ours.begins_as(off, is_whole=not ended and not gone_after(requests[key[0]], seed)):
            wrong.append(f"{key[0]}, choice {key[1]}: {requests[key[0]]}\n  {ours}\n  {off}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 where no answer differs."""
    parser: argparse.ArgumentParser = options(__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix", "eagle3", "medusa"])
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    prompts = [each for each in prompts_of(BUNDLED_MODEL, 160, "any") if len(each) < _MOST_TOKENS // 2]
    requests = mixed_requests(prompts, asked.requests, asked.seed, 2048)
    plain, rows, num_wrong = answered(requests, OFF, asked.seed), [], 0
    for method in asked.methods:
        found = answered(requests, method, asked.seed)
        wrong = different(found, plain, requests, asked.seed)
        num_wrong += len(wrong)
        print(*wrong[:3], sep="\n", end="")
        rows.append(
            {
                "method": method,
                "requests": len(requests),
                "answers": len(found.answers),
                "tokens": sum(len(each.tokens) for each in found.answers.values()),
                "drafted": found.num_drafted,
                "accepted": found.num_accepted,
                "preemptions": found.num_preempted,
                "clients that left": sum(bool(gone_after(each, asked.seed)) for each in requests),
                "different": len(wrong),
            }
        )
    publish(
        "Answers with drafts beside those without",
        rows,
        asked.json,
        "Drafts are verified whether they pay or not.",
    )
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
