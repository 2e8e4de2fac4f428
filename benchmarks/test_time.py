"""Accuracy against tokens on arithmetic: greedy, best of eight, votes, deepconf, a search over steps,
critiques, and a draft model that escalates; best of eight, votes and search under the bundled judge of
steps, too.

`python -m benchmarks.test_time [--model NAME] [--questions 1000] [--temperature 1.0] [--ways WORD ...]
[--json OUT]`

Starts the whole stack with a model, and asks additions of pairs that the bundled model was not trained on,
and other sums, in turn, none of which the judge was trained on but for closed tables. With the bundled model
(`nano`) there are its draft model and its judge; another one, such as `smollm2-135m`, is asked the additions
alone, by the ways that need no other model. The same seed makes the
same samples, so that all ways are paired: eight full votes are the eight choices of `n`, the best of eight
the likeliest of these; the other ways are asked for by `test_time`, and `--ways` leaves out those whose names
have none of its words. An answer is right where its last number is.

Prints per way how many answers were right, tokens per question, tokens in parts of those of eight full votes,
and where a way differs from these, who was right (with the exact sign test's p). Without `--ways` then the
blocks of KV that eight samples of one long prompt use at most, beside one. No figure is of a clock.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from benchmarks.engine.report import Row, options, publish
from benchmarks.stack import RunningStack, running_stack
from checkpoint.files import find
from gateway.test_time.ballots import last_number
from gateway.test_time.votes import leader
from models.corpus import CorpusDocument, Draw, arithmetic, recall
from services.supervisor.config import ROOT

SAMPLES = 8
MAX_TOKENS = 64
# Questions that are under way at a time.
_TOGETHER = 16
_LIMIT_S = 600.0
_POLL_S = 0.01
NANO = "nano"
_CONFIG = """
[security]
context_secret = "the same for every stack of this benchmark"
[observability]
sample_ratio = 0.0
[tiers.standard.test_time]
[tenants.development]
tokens_per_minute = 1000000000
"""
_BUNDLED = {NANO: "nano", "draft": "nano-draft", "judge": "nano-judge"}
FULL = "eight full votes"
_VOTES: Mapping[str, Any] = {"samples": SAMPLES, "scorer": {"type": "number"}}
_ASKED: Mapping[str, Any] = {"type": "verifier", "model": NANO}
_JUDGED: Mapping[str, Any] = {"type": "model", "model": "judge"}
# What is asked for by test_time.
ASKED: Mapping[str, Mapping[str, Any]] = {
    "votes that stop (0.95)": {**_VOTES, "strategy": "self_consistency", "confidence": 0.95},
    "votes that stop (0.9)": {**_VOTES, "strategy": "self_consistency", "confidence": 0.9},
    "deepconf": {**_VOTES, "strategy": "deepconf", "confidence": 0.95},
    "votes that a judge weighs": {
        "strategy": "self_consistency",
        "samples": SAMPLES,
        "scorer": {"type": "number", "model": "judge"},
    },
    "best of eight (verifier)": {"strategy": "best_of", "samples": SAMPLES, "scorer": _ASKED},
    "best of eight (judge)": {"strategy": "best_of", "samples": SAMPLES, "scorer": _JUDGED},
    "search (likelihood)": {"strategy": "search", "samples": SAMPLES},
    "search (judge)": {"strategy": "search", "samples": SAMPLES, "scorer": _JUDGED},
    "critiques": {"strategy": "critique_revise", "samples": 2},
    "draft, escalates (0.9)": {"strategy": "escalate", "model": NANO, "confidence": 0.9},
    "draft, escalates (verifier)": {"strategy": "escalate", "model": NANO, "scorer": _ASKED},
}
# Whose first model is another one.
_OF_DRAFT = "draft, "


class Answered(msgspec.Struct, frozen=True):
    """What one way made of one question."""

    is_right: bool
    num_tokens: int


def question(number: int, model: str) -> CorpusDocument:
    """One of the held-out split: an addition, or for the bundled model other arithmetic, in turn."""
    draw = Draw(number, "eval")
    return arithmetic.addition(draw) if number % 2 or model != NANO else arithmetic.other_arithmetic(draw)


def config_of(model: str) -> str:
    """The stack's, with the model, and the bundled one's companions beside that."""
    folders = {name: f"{ROOT}/models/millrace-{folder}" for name, folder in _BUNDLED.items()}
    paths = folders if model == NANO else {model: str(find(model))}
    return _CONFIG + "".join(f'[models."{name}"]\npath = "{path}"\n' for name, path in paths.items())


def _needs_others(way: Mapping[str, Any]) -> bool:
    return "model" in {**way, **way.get("scorer", {})}


class Asker:
    """Sends questions to a stack."""

    def __init__(
        self, client: httpx.AsyncClient, model: str, temperature: float, words: Sequence[str]
    ) -> None:
        self._client = client
        self._model = model
        self._fixed = {"model": model, "max_tokens": MAX_TOKENS, "temperature": temperature}
        self._ways = {
            way: each
            for way, each in ASKED.items()
            if (not words or any(one in way for one in words)) and (model == NANO or not _needs_others(each))
        }

    async def ask(self, messages: Any, **fields: Any) -> dict[str, Any]:
        """The answer's body."""
        body = {**self._fixed, "messages": list(messages), **fields}
        answer = await self._client.post("/v1/chat/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"refused: {answer.text}")
        told: dict[str, Any] = answer.json()
        return told

    async def ways(self, number: int) -> dict[str, Answered]:
        """What every way makes of a question."""
        asked = question(number, self._model)
        right, messages = last_number(asked.answer), asked.messages[:1]
        found: dict[str, Answered] = {}

        def note(way: str, text: str | None, num_tokens: int) -> None:
            found[way] = Answered(last_number(text or "") == right, num_tokens)

        greedy = await self.ask(messages, temperature=0)
        note("greedy", _text(greedy["choices"][0]), _tokens(greedy))
        full = await self.ask(messages, n=SAMPLES, seed=number, logprobs=True)
        lengths = [len(each["logprobs"]["content"]) for each in full["choices"]]
        note("one sample", _text(full["choices"][0]), lengths[0])
        note("best of eight (likelihood)", _text(max(full["choices"], key=_likelihood)), _tokens(full))
        note(FULL, _voted(full["choices"]), _tokens(full))
        for way, test_time in self._ways.items():
            first = {"model": "draft"} if way.startswith(_OF_DRAFT) else {}
            told = await self.ask(messages, seed=number, test_time=test_time, **first)
            note(way, _text(told["choices"][0]), _tokens(told))
        return found


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice["message"]["content"] or "")


def _tokens(answer: Mapping[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens"])


def _likelihood(choice: Mapping[str, Any]) -> float:
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    is_complete = choice["finish_reason"] == "stop"
    return math.fsum(logprobs) / len(logprobs) if logprobs and is_complete else -math.inf


def _voted(choices: list[dict[str, Any]]) -> str | None:
    votes: dict[str, float] = {}
    for each in choices:
        vote = last_number(_text(each)) if each["finish_reason"] == "stop" else None
        if vote is not None:
            votes[vote] = votes.get(vote, 0) + 1
    return leader(votes)


def sign_test(num_better: int, num_worse: int) -> float:
    """Exact two-sided p of so many pairs that differ."""
    number = num_better + num_worse
    tail = sum(math.comb(number, k) for k in range(min(num_better, num_worse) + 1)) / 2**number
    return min(1.0, 2 * tail)


def rows_of(answered: list[dict[str, Answered]]) -> list[Row]:
    """A row per way, against the full votes."""
    full = [each[FULL] for each in answered]
    rows: list[Row] = []
    for way in answered[0]:
        ours = [each[way] for each in answered]
        better = sum(one.is_right and not other.is_right for one, other in zip(ours, full, strict=True))
        worse = sum(other.is_right and not one.is_right for one, other in zip(ours, full, strict=True))
        rows.append(
            {
                "way": way,
                "questions": len(ours),
                "right %": 100 * sum(each.is_right for each in ours) / len(ours),
                "tokens a question": sum(each.num_tokens for each in ours) / len(ours),
                "of full votes": sum(each.num_tokens for each in ours)
                / sum(each.num_tokens for each in full),
                "right here alone": better,
                "right in full votes alone": worse,
                "p": sign_test(better, worse),
            }
        )
    return rows


async def _all_ways(asker: Asker, num_questions: int) -> list[dict[str, Answered]]:
    turn = asyncio.Semaphore(_TOGETHER)

    async def one(number: int) -> dict[str, Answered]:
        async with turn:
            return await asker.ways(number)

    return await asyncio.gather(*map(one, range(num_questions)))


async def _most_blocks(stack: RunningStack, asker: Asker, **fields: Any) -> int:
    """KV blocks that a request uses at most, where nothing else runs."""
    document = recall.recall(Draw(1, "eval"), 1150)
    asking = asyncio.create_task(asker.ask(document.messages[:1], seed=1, min_tokens=MAX_TOKENS, **fields))
    most = 0
    while not asking.done():
        used = await asyncio.to_thread(stack.counter, "engine", "millrace_engine_kv_blocks", 'state="used"')
        most = max(most, round(used))
        await asyncio.sleep(_POLL_S)
    await asking
    return most


async def _measure(stack: RunningStack, arguments: argparse.Namespace) -> tuple[list[Row], str]:
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    async with httpx.AsyncClient(
        base_url=stack.url, headers=headers, timeout=_LIMIT_S, trust_env=False
    ) as client:
        asker = Asker(client, arguments.model, arguments.temperature, arguments.ways)
        rows = rows_of(await _all_ways(asker, arguments.questions))
        if arguments.ways:
            return rows, ""
        one = await _most_blocks(stack, asker)
        several = await _most_blocks(stack, asker, test_time={"strategy": "best_of", "samples": SAMPLES})
    notes = (
        f"KV blocks of a prompt of about 1,150 tokens and {MAX_TOKENS} more: one answer {one}, eight samples "
    )
    return rows, f"{notes}{several}, which is {several / max(1, one):.2f} times as much."


def main() -> None:
    """Prints the table."""
    parser = options(__doc__)
    parser.add_argument("--model", default=NANO)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--ways", nargs="*", default=[])
    arguments = parser.parse_args()
    engines = len(_BUNDLED) if arguments.model == NANO else 1
    with running_stack(config_of(arguments.model), "--engines", str(engines)) as stack:
        rows, notes = asyncio.run(_measure(stack, arguments))
    whose = "the bundled model" if arguments.model == NANO else arguments.model
    title = f"Arithmetic of {whose}, temperature {arguments.temperature:g}, {SAMPLES} samples"
    publish(title, rows, arguments.json, notes)


if __name__ == "__main__":
    main()
