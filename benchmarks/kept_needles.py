"""What answers that forget (`kv`) are still worth, for each policy and keep: needles by depth, tasks, how
well a text is foreseen, and how fast an answer goes on.

    python -m benchmarks.kept_needles [--model bundled] [--scorer FOLDER] [--policies snapkv kvzap]
        [--keeps 0.75 0.5 0.25] [--repeats 12] [--tasks 24] [--texts 8] [--decode-tokens 2048]
        [--kv-dtype kivi4] [--json OUT]

Everything is asked at the end of a text of about 1,024 tokens, and answered greedily: `needles` are those of
`millrace gate`, every second with distractors, whose line lies at the text's beginning, in its middle or at
its end; `tasks` are the gate's, behind a text that has nothing to do with them. `nats a token` is of the last
quarter of a text, token by token after the others (a grammar holds the answer to it; probabilities are those
before it does). Beside them stands the share of their attention that the needles' answers lost at most.

`tokens/s` is that of one answer to a prompt of `--decode-tokens`, nobody measuring what it loses, by policies
in turns; `times full` beside what forgets nothing in the same turn. `prompt, times` is how long the prompt
takes until its first token, as a multiple of the same; no prompt finds another's blocks.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import llguidance
import numpy as np
from tokenizers import Tokenizer

from benchmarks.engine.report import Row, options, publish
from benchmarks.gate import WINDOW
from checkpoint.files import find
from contract.retention import FULL, POLICIES, SCORED, Retention
from engine.config import CacheConfig, EngineConfig, KvDtype
from engine.runner.build import build_here
from engine.scheduler import Scheduler
from engine.types import GrammarSpec, Request, SamplingParams, TokenEvent
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.lessons import LessonRow, LessonWriter
from services.gate import lines
from services.gate.cases import Case, Pair, ServerAnswer
from services.gate.generated import lines_of, needles
from services.gate.scoring import Scorer
from services.gate.suite import TaskLayer
from services.supervisor.config import BUNDLED_MODEL
from tokenizer_svc.text.checkpoint import load_checkpoint

_DEPTHS = (0.0, 0.5, 1.0)
_MOST_TOKENS = 24
# Tokens of an answer that is timed.
_TIMED_TOKENS = 48
_CHARS_PER_TOKEN = 3.6
_SCORER = Path(__file__).parents[1] / "models" / "kvzap-smollm2-135m"
_TURN_ENDS = re.compile(r"<\|im_end\|>|<\|endoftext\|>")


@dataclass(kw_only=True)
class Said:
    """Of one request: tokens, log-probabilities where they were asked for, what was lost, seconds until the
    first token, and seconds a token behind it.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    lost: float = 0.0
    prompt_s: float = 0.0
    seconds: float = 0.0


class Model:
    """One that is asked one request after another, in this process."""

    def __init__(self, name: str, scorer: str, kv_dtype: KvDtype = "auto") -> None:
        folder = BUNDLED_MODEL if name == "bundled" else find(name)
        # Prompts stay in it from one policy to the next.
        cache = CacheConfig(
            kv_cache_bytes=2 << 30,
            forgotten_bytes=1 << 30,
            kvzap=scorer,
            kv_dtype=kv_dtype,
            block_size=KEY_GROUP if kv_dtype == BY_CHANNEL else 16,
        )
        self._config = EngineConfig(num_threads=2, cache=cache)
        model = ModelConfig(path=str(folder))
        self.runner, memory, _ = build_here(self._config, model, lambda phase, part: None)
        self.scheduler = Scheduler(self._config.scheduler, cache, memory, model="m")
        self._num_asked = 0
        checkpoint = load_checkpoint(folder)
        self._writer, self._tokenizer = (
            LessonWriter(checkpoint),
            Tokenizer.from_str(checkpoint.tokenizer_json),
        )

    def asked(self, case: Case) -> tuple[int, ...]:
        """The prompt of a chat."""
        text = self._writer.render(LessonRow(), case.body["messages"], asks=True)
        return tuple(self._writer.ids(text))

    def ids(self, text: str) -> tuple[int, ...]:
        """Of a text by itself."""
        return tuple(self._writer.ids(text))

    def text(self, tokens: Sequence[int]) -> str:
        """Until the turn ends."""
        return _TURN_ENDS.split(self._tokenizer.decode(list(tokens), skip_special_tokens=False))[0]

    def say(self, prompt: tuple[int, ...], kept: Retention | None, num_tokens: int, forced: str = "") -> Said:
        """Its greedy answer, or its probabilities of what it is `forced` to say."""
        scheduler, grammar = self.scheduler, None
        self._num_asked += 1
        if forced:
            payload = llguidance.LLMatcher.grammar_from_lark(f"start: {json.dumps(forced)}")
            grammar = GrammarSpec(digest="", payload=payload.encode(), backend="llguidance/1")
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=not forced, logprobs=0 if forced else None
        )
        request = Request(
            request_id=self._num_asked,
            external_id="",
            prompt_token_ids=prompt,
            sampling=sampling,
            grammar=grammar,
            retention=kept,
        )
        scheduler.submit(request, 0.0)
        said, times, began = Said(), [], time.perf_counter()
        while scheduler.has_work:
            scheduler.update(self.runner.launch(scheduler.schedule(1.0)).wait(), 1.0)
            for event in scheduler.drain_events():
                self._take(said, event)
                times += [time.perf_counter()] * len(event.token_ids)
        said.prompt_s = times[0] - began
        said.seconds = (times[-1] - times[0]) / max(1, len(times) - 1)
        return said

    def _take(self, said: Said, event: TokenEvent) -> None:
        assert event.failure is None, event.failure
        said.tokens += event.token_ids
        said.logprobs += tuple(each.logprob for each in event.logprobs)
        if event.statistics is not None:
            said.lost = event.statistics.lost_tokens


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What every policy is asked."""

    needles: Sequence[Case]
    tasks: Sequence[Case]
    # Texts, each with the part of it that is foreseen.
    texts: Sequence[tuple[str, str]]


def questions(num_repeats: int, num_tasks: int, num_texts: int) -> Questions:
    """The same in every run."""
    fillers = [each.text or "" for each in lines_of("intrinsic", 11, num_tasks, is_long=True)]
    tasks = [
        lines.CaseLine(
            id=each.id,
            prompt=f"{filler}\n\n{each.prompt}",
            check=each.check,
            answer=each.answer,
        )
        for each, filler in zip(lines_of("task", 7, num_tasks), fillers, strict=True)
    ]
    continued = [lines.continued(each) for each in lines_of("intrinsic", 7, num_texts, is_long=True)]
    return Questions(
        needles=needles(
            7,
            window=WINDOW,
            chars_per_token=_CHARS_PER_TOKEN,
            lengths=(1.0,),
            depths=_DEPTHS,
            repeats=num_repeats,
            kinds=("single", "distractors"),
            max_tokens=_MOST_TOKENS,
        ),
        tasks=lines.to_cases(tasks, "task", TaskLayer(max_tokens=2 * _MOST_TOKENS), 7),
        texts=[(each.body["prompt"], each.answer) for each in continued],
    )


def quality(model: Model, asked: Questions, kept: Retention | None) -> Row:
    """What is found at each depth, solved, foreseen and lost."""
    scorer = Scorer(seeds_hold=True)

    def score(case: Case) -> tuple[float, float]:
        said = model.say(model.asked(case), kept, case.body["max_tokens"])
        answer = ServerAnswer(text=model.text(said.tokens))
        pair = Pair(case=case, baseline=answer, candidate=answer)
        return scorer.score(pair).candidate, said.lost / len(said.tokens)

    found = {depth: [score(each) for each in asked.needles if each.depth == depth] for depth in _DEPTHS}
    nats: list[float] = []
    for text, rest in asked.texts:
        said = model.say(model.ids(text), kept, len(rest), rest)
        assert model.text(said.tokens) == rest, "held to it"
        nats += said.logprobs[: len(said.tokens)]
    shares: Row = {
        f"found at {100 * depth:g} %": float(np.mean([share for share, _ in each]))
        for depth, each in found.items()
    }
    return shares | {
        "tasks": float(np.mean([score(each)[0] for each in asked.tasks])),
        "nats a token": -float(np.mean(nats)),
        "attention lost": float(np.mean([lost for each in found.values() for _, lost in each])),
    }


def timed(model: Model, kinds: Sequence[Retention | None], num_tokens: int, rounds: int) -> list[Row]:
    """Tokens a second of each, and how long its prompts take beside the first one's, in turns."""
    text = " ".join(each.text or "" for each in lines_of("intrinsic", 5, 1 + num_tokens // 500, is_long=True))
    found: list[list[Said]] = [[] for _ in kinds]
    for turn in range(rounds):
        for number, kept in enumerate(kinds):
            prompt = model.ids(f"{turn}, {number}. {text}")[:num_tokens]
            found[number].append(model.say(prompt, kept, _TIMED_TOKENS))
    return [
        {
            "tokens/s": 1 / median(own.seconds for own in each),
            "times full": median(
                full.seconds / own.seconds for own, full in zip(each, found[0], strict=True)
            ),
            "prompt, times": median(a.prompt_s / b.prompt_s for a, b in zip(each, found[0], strict=True)),
        }
        for each in found
    ]


def without_bound(kept: Retention | None) -> Retention | None:
    """The same, nobody measuring what it loses."""
    if kept is None:
        return None
    return Retention(policy=kept.policy, keep=kept.keep)


def main() -> None:
    """Prints one row for each policy and keep."""
    parser = options(__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--scorer", type=Path, help="of kvzap; that of smollm2-135m is known")
    parser.add_argument("--policies", nargs="+", choices=POLICIES[1:], default=POLICIES[1:])
    parser.add_argument("--kv-dtype", choices=get_args(KvDtype), default="auto")
    parser.add_argument("--keeps", type=float, nargs="+", default=(0.75, 0.5, 0.25))
    for name, value in (("repeats", 12), ("tasks", 24), ("texts", 8), ("decode-tokens", 2048), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    scorer = given.scorer or (_SCORER if given.model == _SCORER.name.removeprefix("kvzap-") else None)
    policies = [each for each in given.policies if each != SCORED or scorer is not None]
    if not policies:
        raise ConfigError("--policies: kvzap takes --scorer; millrace train-kvzap makes one")
    kinds: list[Retention | None] = [
        None,
        *(Retention(policy=policy, keep=keep, max_lost=1.0) for policy in policies for keep in given.keeps),
    ]
    model = Model(given.model, "" if scorer is None else str(scorer), given.kv_dtype)
    asked = questions(given.repeats, given.tasks, given.texts)
    with closing(model.runner):
        found = [quality(model, asked, each) for each in kinds]
        times = timed(model, list(map(without_bound, kinds)), given.decode_tokens, given.rounds)
    rows: list[Row] = [
        {"policy": FULL if kept is None else kept.policy, "keep": 1.0 if kept is None else kept.keep or 1.0}
        | quality_row
        | time_row
        for kept, quality_row, time_row in zip(kinds, found, times, strict=True)
    ]
    lengths = [len(model.asked(each)) for each in asked.needles]
    notes = (
        f"{given.model}, keys and values {given.kv_dtype}. {given.repeats} texts of {min(lengths)} to "
        f"{max(lengths)} tokens for each depth, "
        f"{given.tasks} tasks, {given.texts} texts that are continued; tokens/s behind {given.decode_tokens}."
    )
    publish("What answers that forget are still worth", rows, given.json, notes)


if __name__ == "__main__":
    main()
