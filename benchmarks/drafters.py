"""What each way to draft gains and costs: no drafts, look-ups, lookahead, a draft model and trained heads, in
turns.

    python -m benchmarks.drafters --draft-model models/millrace-nano-draft --head FOLDER
    python -m benchmarks.drafters --model smollm2-135m --head FOLDER --streams 1 8
    python -m benchmarks.drafters --mixed --tasks extraction chat code summary --only suffix

One engine for each method, all in this process: loop, scheduler and runner as they serve, the price of drafts
included. In each round every method answers the same prompts (held-out conversations of the bundled model's
evaluation split, of one kind at a time with --tasks; code and summary ask for this repository's sources and
pages), with so many streams at a time, in an order that changes from round to round; the next round has other
prompts, and answers end where the model ends them. With --mixed each task is a tenant, "hot" is one more
whose answers nobody foresees (temperature 2), and all share the streams; a tenant's rate is that of its
answers while they run.

Beside the figures of no drafts in the same round stand the medians over the rounds, with bootstrapped 95 %
intervals. "off again" is a second engine without drafts, so what it differs by is noise; "overlap" plans the
next step while one runs, without drafts. The accept length is tokens per step of a stream. Gaps are times
between a stream's events; the pace is how long the latest eight tokens took, for each token, which is what a
reader waits where tokens come several at a time. "same" is the share of answers that are those without
drafts, token for token. Methods whose folder is not given are left out. With --tree heads also draft trees of
that shape, beside their chains.

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
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core.__main__ import make_scheduler
from engine.core.loop import EngineLoop
from engine.core.warm_up import TOGETHER, WarmUp
from engine.runner.build import build_here
from engine.speculation_config import SpeculationConfig
from engine.types import TokenEvent
from models.corpus import documents
from runtime.config import ModelConfig
from services.drafter.lessons import read_lessons
from services.supervisor.config import BUNDLED_MODEL

OFF = "off"
_CONTROL, _OVERLAP = "off again", "overlap"
_NOTHING_LOADED = ("ngram", "suffix", "lookahead")
_HEADS = ("eagle3", "medusa", "mtp")
_MOST_PROMPT_TOKENS = 512
_ANY, _ALL, _HOT = "any", "all", "hot"
# Tasks that this repository's own files are asked about: which, how, and how much of each.
_OWN_FILES = {
    "code": ("engine/**/*.py", "Write this Python code again, with better comments.", 500),
    "summary": ("docs/**/*.md", "Summarize this text in two sentences.", 500),
}
# Tokens over which the pace counts.
_PACE_TOKENS = 8
_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class _Asked:
    tenant: str
    prompt: tuple[int, ...]


@dataclass
class MethodAnswers:
    """What one method made of a load, or of one tenant's part of it."""

    seconds: float = 0.0
    # By request: tokens, and when events came with how many tokens behind them.
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    tenants: dict[int, str] = field(default_factory=dict)

    def note(self, event: TokenEvent) -> None:
        if event.token_ids:
            known = self.tokens.setdefault(event.request_id, [])
            known.extend(event.token_ids)
            self.times.setdefault(event.request_id, []).append((time.perf_counter(), len(known)))

    def of(self, tenant: str) -> MethodAnswers:
        """That of one tenant; its time is that of its answers, one after another."""
        ids = [each for each, owner in self.tenants.items() if owner == tenant and each in self.times]
        times = {each: self.times[each] for each in ids}
        seconds = sum(events[-1][0] - events[0][0] for events in times.values())
        return MethodAnswers(seconds, {each: self.tokens[each] for each in ids}, times)

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
        events = self.times.values()
        gaps = [after - before for each in events for (before, _), (after, _) in pairwise(each)]
        return 1e3 * percentile(gaps, 0.99)

    @property
    def pace_p99_ms(self) -> float:
        """Of each event that has so many tokens before it."""
        paces = []
        for events in self.times.values():
            # [L] when each token came.
            came = [
                at for before, (at, known) in pairwise([(0.0, 0), *events]) for _ in range(known - before[1])
            ]
            ends = (known - 1 for _, known in events if known > _PACE_TOKENS)
            paces += [(came[end] - came[end - _PACE_TOKENS]) / _PACE_TOKENS for end in ends]
        return 1e3 * percentile(paces, 0.99)


def methods_of(arguments: argparse.Namespace) -> dict[str, SpeculationConfig]:
    """Those that can be had, no drafts first."""
    num_drafts = arguments.drafts
    found = {name: SpeculationConfig() for name in (OFF, _CONTROL, _OVERLAP)}
    folders = {"draft_model": arguments.draft_model, "eagle3": arguments.head, "medusa": arguments.medusa}
    folders["mtp"] = arguments.mtp
    for name, folder in (*dict.fromkeys(_NOTHING_LOADED, "").items(), *folders.items()):
        if folder or name in _NOTHING_LOADED:
            values = {"method": name, "draft_model": folder, "num_draft_tokens": num_drafts}
            values |= {"min_acceptance": 0.0} if arguments.always else {}
            found[name] = msgspec.convert(values, SpeculationConfig)
            if arguments.tree and name in _HEADS:
                found[f"{name} tree"] = msgspec.convert(values | {"tree": arguments.tree}, SpeculationConfig)
    wanted = (OFF, *(arguments.only or found))
    return {name: each for name, each in found.items() if name in wanted}


def opened(
    model: Path, speculation: SpeculationConfig, streams: int, stack: ExitStack, *, overlap: bool = False
) -> InProcessEngine:
    """An engine that is closed with the stack, after the first steps that every engine takes: it knows how
    long they are by their rows.
    """
    scheduler = SchedulerConfig(max_num_seqs=max(streams, TOGETHER), overlap="on" if overlap else "off")
    cache = CacheConfig(kv_cache_bytes=_CACHE_BYTES)
    config = EngineConfig(cache=cache, scheduler=scheduler, speculation=speculation)
    given = ModelConfig(path=str(model))
    runner, memory, facts = build_here(config, given, lambda stage, part: None)
    stack.callback(runner.close)
    first = make_scheduler(config, given, memory, facts)
    WarmUp(runner, first, config, memory, facts, overlap=overlap).run()
    mailbox = Mailbox()
    loop = EngineLoop(make_scheduler(config, given, memory, facts), runner, mailbox, overlap=overlap)
    return InProcessEngine(loop, mailbox, memory, facts)


def answered(
    engine: InProcessEngine, asked: Sequence[_Asked], num_tokens: int, streams: int, draw: str
) -> MethodAnswers:
    """Answers all prompts, so many at a time."""
    answers, waiting, running = MethodAnswers(), list(reversed(asked)), 0

    def listen(event: TokenEvent) -> None:
        nonlocal running
        answers.note(event)
        running -= event.finish_reason is not None

    engine.mailbox.listener = listen
    gc.collect()
    began = time.perf_counter()
    while waiting or running:
        while waiting and running < streams:
            each = waiting.pop()
            drawn = "hot" if each.tenant == _HOT else draw
            request = engine.submit(0, num_tokens, drawn, each.prompt, ends=True, tenant=each.tenant)
            answers.tenants[request] = each.tenant
            running += 1
        engine.loop.step()
    answers.seconds = time.perf_counter() - began
    return answers


def _rows_of(task: str) -> Iterator[dict[str, Any]]:
    """Conversations of a task that end with an answer."""
    if task in _OWN_FILES:
        pattern, words, size = _OWN_FILES[task]
        for path in sorted(Path().glob(pattern)):
            text = path.read_text(encoding="utf-8")
            for begin in range(0, len(text) - size, size):
                asked = f"{words}\n\n{text[begin : begin + size]}"
                answer = {"role": "assistant", "content": "Here it is."}
                yield {"messages": [{"role": "user", "content": asked}, answer]}
        return
    for each in documents(MIXTURE, SEED, "eval"):
        if task in (_ANY, each.task) and each.messages and each.messages[-1]["role"] == "assistant":
            yield {"messages": list(each.messages), "tools": list(each.tools)}


def prompts_of(model: Path, number: int, task: str) -> list[tuple[int, ...]]:
    """Held-out conversations that end with an answer, without it, by the model's own template."""
    rows = islice(_rows_of(task), 4 * number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "eval.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        lessons = read_lessons(path, model, _MOST_PROMPT_TOKENS)
    return [tuple(each.ids[: each.num_given]) for each in lessons if each.num_given][:number]


def asked_of(model: Path, tasks: Sequence[str], number: int, *, mixed: bool) -> list[_Asked]:
    """So many prompts; of several tenants in turns."""
    if not mixed:
        return [_Asked("", prompt) for prompt in prompts_of(model, number, tasks[0])]
    each = -(-number // (len(tasks) + 1))
    prompts = {task: prompts_of(model, each, task) for task in tasks} | {
        _HOT: prompts_of(model, each, "chat")
    }
    turns = zip(*prompts.values(), strict=True)
    return [_Asked(tenant, prompt) for turn in turns for tenant, prompt in zip(prompts, turn, strict=True)]


def measured(
    arguments: argparse.Namespace, model: Path, streams: int, tasks: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each method at so many streams, and for each tenant where there are several."""
    each_round = max(arguments.answers, streams)
    asked = asked_of(model, tasks, each_round * (arguments.rounds + 1), mixed=arguments.mixed)
    rounds = [asked[at : at + each_round] for at in range(0, len(asked), each_round)][: arguments.rounds + 1]
    found: dict[str, list[MethodAnswers]] = {}
    with ExitStack() as stack:
        engines = {
            name: opened(model, speculation, streams, stack, overlap=name == _OVERLAP)
            for name, speculation in methods_of(arguments).items()
        }
        # The first round is not counted: prices are learned in it.
        for number, load in enumerate(rounds):
            for name in random.Random(number).sample(list(engines), len(engines)):
                done = answered(engines[name], load, arguments.tokens, streams, arguments.draw)
                if number:
                    found.setdefault(name, []).append(done)
    for name in engines:
        answers = found[name]
        task = _ALL if arguments.mixed else tasks[0]
        yield {"method": name, "task": task, "streams": streams, **_figures(answers, found[OFF])}
        for tenant in (*tasks, _HOT) if arguments.mixed else ():
            beside = [[each.of(tenant) for each in whose] for whose in (answers, found[OFF])]
            yield {"method": name, "task": tenant, "streams": streams, **_figures(*beside)}


def _figures(answers: Sequence[MethodAnswers], plain: Sequence[MethodAnswers]) -> dict[str, Any]:
    """What a method made of the rounds, beside no drafts."""
    figures: dict[str, Any] = {"accept length": sum(each.accept_length for each in answers) / len(plain)}
    for name, unit, figure, beside in (
        ("times off", "tokens/s", "tokens_per_s", "its 95 %"),
        ("gap times off", "p99 gap ms", "gap_p99_ms", "its 95 % too"),
        ("pace times off", "p99 pace ms", "pace_p99_ms", "95 % of that"),
    ):
        values, others = (
            [getattr(each, figure) for each in answers],
            [getattr(each, figure) for each in plain],
        )
        ratio, *within = interval([ours / off for ours, off in zip(values, others, strict=True)])
        figures |= {unit: interval(values)[0], name: ratio, beside: "{:.3f} … {:.3f}".format(*within)}
    same = [
        said == other
        for each, off in zip(answers, plain, strict=True)
        for (_, said), (_, other) in zip(sorted(each.tokens.items()), sorted(off.tokens.items()), strict=True)
    ]
    return figures | {"same": sum(same) / len(same)}


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
    parser.add_argument(
        "--tasks", nargs="+", default=[_ANY], help="such as chat extraction tools story code summary"
    )
    parser.add_argument("--only", nargs="+", default=[], help="methods beside off, as the table names them")
    parser.add_argument("--mixed", action="store_true", help="a tenant for each task, at the same time")
    parser.add_argument("--drafts", type=int, default=4, help="of a step at most")
    parser.add_argument("--always", action="store_true", help="draft whatever it costs: what a way can bring")
    parser.add_argument("--draw", choices=["greedy", "sampled"], default="greedy")
    arguments = parser.parse_args()
    model = find(str(BUNDLED_MODEL) if arguments.model == "bundled" else arguments.model)
    rows = [
        row
        for tasks in ([arguments.tasks] if arguments.mixed else [[task] for task in arguments.tasks])
        for streams in arguments.streams
        for row in measured(arguments, model, streams, tasks)
    ]
    notes = f"{model.name}; {arguments.rounds} rounds in turns, {arguments.draw}, at most {arguments.tokens} "
    notes += "tokens each."
    publish("Ways to draft beside none", rows, arguments.json, notes)


if __name__ == "__main__":
    main()
