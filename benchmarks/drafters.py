"""What each way to draft gains and costs: no drafts, look-ups, lookahead, a draft model and trained heads, in
turns.

    python -m benchmarks.drafters --draft-model models/millrace-nano-draft --head FOLDER
    python -m benchmarks.drafters --model smollm2-135m --head FOLDER --streams 1 8

One engine for each method, all in this process: loop, scheduler and runner as they serve, the price of drafts
included. In each round every method answers the same held-out conversations (the bundled model's evaluation
split, or with --tasks those of one kind at a time), with so many streams at a time, in an order that changes
from round to round; the next round has other conversations, and answers end where the model ends them.
Beside the rates of no drafts in the same round stand the medians over the rounds, with bootstrapped 95 %
intervals. The accept length is tokens per step of a stream; gaps are times between a stream's events, and
"same" is the share of answers that are those without drafts, token for token. Methods whose folder is not
given are left out. With --tree heads also draft trees of that shape, beside their chains.

A quiet machine is needed; on two cores the bundled model takes about four minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine.report import options, percentile, publish
from benchmarks.in_process import InProcessEngine, Mailbox
from benchmarks.quantization import MIXTURE, SEED
from benchmarks.tracing_overhead import interval
from checkpoint.files import find
from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core.__main__ import make_scheduler
from engine.core.loop import EngineLoop
from engine.core.warm_up import TOGETHER, WarmUp
from engine.runner.build import build_here
from engine.types import TokenEvent
from models.corpus import documents
from runtime.config import ModelConfig
from services.drafter.lessons import read_lessons
from services.supervisor.config import BUNDLED_MODEL

OFF = "off"
_NOTHING_LOADED = ("ngram", "suffix", "lookahead")
_HEADS = ("eagle3", "medusa", "mtp")
_MOST_PROMPT_TOKENS = 512
_ANY = "any"
_CACHE_BYTES = 256 << 20


@dataclass
class MethodAnswers:
    """What one method made of a load."""

    seconds: float = 0.0
    # By request: tokens, and when events came.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)

    def note(self, event: TokenEvent) -> None:
        if event.token_ids:
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            self.times.setdefault(event.request_id, []).append(time.perf_counter())

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds

    @property
    def accept_length(self) -> float:
        """Of all events but the first ones, which end the prompts."""
        events = sum(len(each) - 1 for each in self.times.values())
        return (sum(map(len, self.tokens.values())) - len(self.tokens)) / max(1, events)

    @property
    def gap_p99_ms(self) -> float:
        gaps = [after - before for each in self.times.values() for before, after in pairwise(each)]
        return 1e3 * percentile(gaps, 0.99)


def methods_of(arguments: argparse.Namespace) -> dict[str, SpeculationConfig]:
    """Those that can be had, no drafts first."""
    num_drafts = arguments.drafts
    found = {OFF: SpeculationConfig()}
    folders = {"draft_model": arguments.draft_model, "eagle3": arguments.head, "medusa": arguments.medusa}
    folders["mtp"] = arguments.mtp
    for name, folder in (*dict.fromkeys(_NOTHING_LOADED, "").items(), *folders.items()):
        if folder or name in _NOTHING_LOADED:
            values = {"method": name, "draft_model": folder, "num_draft_tokens": num_drafts}
            values |= {"min_acceptance": 0.0} if arguments.always else {}
            found[name] = msgspec.convert(values, SpeculationConfig)
            if arguments.tree and name in _HEADS:
                found[f"{name} tree"] = msgspec.convert(values | {"tree": arguments.tree}, SpeculationConfig)
    return found


def opened(model: Path, speculation: SpeculationConfig, streams: int, stack: ExitStack) -> InProcessEngine:
    """An engine that is closed with the stack, after the first steps that every engine takes: it knows how
    long they are by their rows.
    """
    config = EngineConfig(
        cache=CacheConfig(kv_cache_bytes=_CACHE_BYTES),
        scheduler=SchedulerConfig(max_num_seqs=max(streams, TOGETHER)),
        speculation=speculation,
    )
    given = ModelConfig(path=str(model))
    runner, memory, facts = build_here(config, given, lambda stage, part: None)
    stack.callback(runner.close)
    WarmUp(runner, make_scheduler(config, given, memory, facts), config, memory, facts, overlap=False).run()
    mailbox = Mailbox()
    loop = EngineLoop(make_scheduler(config, given, memory, facts), runner, mailbox)
    return InProcessEngine(loop, mailbox, memory, facts)


def answered(
    engine: InProcessEngine, prompts: Sequence[tuple[int, ...]], num_tokens: int, streams: int, draw: str
) -> MethodAnswers:
    """MethodAnswers all prompts, so many at a time."""
    answers, waiting, running = MethodAnswers(), list(reversed(prompts)), 0

    def listen(event: TokenEvent) -> None:
        nonlocal running
        answers.note(event)
        running -= event.finish_reason is not None

    engine.mailbox.listener = listen
    gc.collect()
    began = time.perf_counter()
    while waiting or running:
        while waiting and running < streams:
            engine.submit(0, num_tokens, draw, prompt=waiting.pop(), ends=True)
            running += 1
        engine.loop.step()
    answers.seconds = time.perf_counter() - began
    return answers


def prompts_of(model: Path, number: int, task: str) -> list[tuple[int, ...]]:
    """Held-out conversations that end with an answer, without it, by the model's own template."""
    source = documents(MIXTURE, SEED, "eval")
    asked = (each for each in source if task in (_ANY, each.task))
    ended = (each for each in asked if each.messages and each.messages[-1]["role"] == "assistant")
    rows = (
        {"messages": list(each.messages), "tools": list(each.tools)} for each in islice(ended, 4 * number)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "eval.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        lessons = read_lessons(path, model, _MOST_PROMPT_TOKENS)
    return [tuple(each.ids[: each.num_given]) for each in lessons if each.num_given][:number]


def measured(arguments: argparse.Namespace, model: Path, streams: int, task: str) -> Iterator[dict[str, Any]]:
    """A row for each method at so many streams."""
    each_round = max(arguments.answers, streams)
    prompts = prompts_of(model, each_round * (arguments.rounds + 1), task)
    rounds = [prompts[at : at + each_round] for at in range(0, len(prompts), each_round)]
    found: dict[str, list[MethodAnswers]] = {}
    with ExitStack() as stack:
        engines = {
            name: opened(model, speculation, streams, stack)
            for name, speculation in methods_of(arguments).items()
        }
        # The first round is not counted: prices are learned in it.
        for number, asked in enumerate(rounds):
            for name in random.Random(number).sample(list(engines), len(engines)):
                done = answered(engines[name], asked, arguments.tokens, streams, arguments.draw)
                if number:
                    found.setdefault(name, []).append(done)
    plain = found[OFF]
    for name in engines:
        ratios = [each.tokens_per_s / off.tokens_per_s for each, off in zip(found[name], plain, strict=True)]
        gaps = [each.gap_p99_ms / off.gap_p99_ms for each, off in zip(found[name], plain, strict=True)]
        same = [
            said == other
            for each, off in zip(found[name], plain, strict=True)
            for said, other in zip(each.tokens.values(), off.tokens.values(), strict=True)
        ]
        (ratio, *ratio_range), (gap, *gap_range) = interval(ratios), interval(gaps)
        yield {
            "method": name,
            "task": task,
            "streams": streams,
            "accept length": sum(each.accept_length for each in found[name]) / len(plain),
            "tokens/s": interval([each.tokens_per_s for each in found[name]])[0],
            "times off": ratio,
            "its 95 %": "{:.3f} … {:.3f}".format(*ratio_range),
            "p99 gap ms": interval([each.gap_p99_ms for each in found[name]])[0],
            "gap times off": gap,
            "its 95 % too": "{:.3f} … {:.3f}".format(*gap_range),
            "same": sum(same) / len(same),
        }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="bundled", help="bundled, a folder, or a known name")
    parser.add_argument("--draft-model", default="", help="folder of a draft model of the same vocabulary")
    parser.add_argument("--head", default="", help="folder of a head of EAGLE-3")
    parser.add_argument("--medusa", default="", help="folder of heads of Medusa")
    parser.add_argument("--mtp", default="", help="folder of a layer that predicts further tokens")
    parser.add_argument("--tree", type=json.loads, default=[], help="of heads, as in engine.speculation.tree")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5, help="that are counted")
    parser.add_argument("--answers", type=int, default=16, help="of a round; at least one for each stream")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--tasks", nargs="+", default=[_ANY], help="such as chat extraction tools story")
    parser.add_argument("--drafts", type=int, default=4, help="of a step at most")
    parser.add_argument("--always", action="store_true", help="draft whatever it costs: what a way can bring")
    parser.add_argument("--draw", choices=["greedy", "sampled"], default="greedy")
    arguments = parser.parse_args()
    model = find(str(BUNDLED_MODEL) if arguments.model == "bundled" else arguments.model)
    rows = [
        row
        for task in arguments.tasks
        for streams in arguments.streams
        for row in measured(arguments, model, streams, task)
    ]
    notes = f"{model.name}; {arguments.rounds} rounds in turns, {arguments.draw}, at most {arguments.tokens} "
    notes += "tokens each."
    publish("Ways to draft beside none", rows, arguments.json, notes)


if __name__ == "__main__":
    main()
