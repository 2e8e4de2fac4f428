"""The gate's layers of a form, on two samples of cases: what `quality_forms` shows beside its first columns.

Lines are the gate's generated ones, answers are greedy and scored by the gate's scorer. Nothing guides what
is written: under a schema's or a tool's grammar every form is valid, and says nothing. What is asked is what
the model in bfloat16 sometimes gets wrong, as far as the lines allow it: SmolLM2 calls no tool as it is, so
its structure is schemas alone; the bundled model's is tools as well.

Samples differ in their seed, and texts in being others. Each has its own mean and interval, so that a
difference which one sample alone has shows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import transformers
from numpy.typing import NDArray

from engine.types import SamplingParams
from gateway.text.delta import TextDelta
from gateway.text.tool_calls import PARSERS
from gateway.text.tool_calls.values import ToolTypes
from services.gate.cases import Case, LayerName, Pair, ServerAnswer, ToolInvocation
from services.gate.generated import lines_of, needles
from services.gate.lines import CaseLine, to_cases
from services.gate.scoring import Scorer
from services.gate.statistics import MeanBounds, bootstrap, mean_of
from services.gate.suite import BehaviourLayer, StructureLayer, TaskLayer
from tests.unit.engine.runner.driver import Driver, Job

SEEDS = (6, 7)
ASKED: tuple[LayerName, ...] = ("task", "structure", "long_context", "behaviour")
# Those that have no column of their own elsewhere.
NEW: tuple[LayerName, ...] = ("structure", "long_context", "behaviour")
ALL: tuple[LayerName, ...] = ("intrinsic", *ASKED)
TASKS, STRUCTURES, BEHAVIOURS = 16, 20, 20
# Of each length and depth, one of each kind.
NEEDLES = 4
# Of needles: shares of the window, and of the text before them.
LENGTHS, DEPTHS = (1.0,), (0.0, 0.5, 1.0)
# Both tokenizers' texts of needles have a little more.
_CHARS_PER_TOKEN = 3.6
# Sequences of a step: few where texts are long, and the cache would not hold them.
_TOGETHER, _LONG_TOGETHER = 48, 12
_END = "<|im_end|>"
# Both models' templates, and tools where there are some, are of this form.
_CALLS = "hermes"
# Of intervals.
_LEVEL = 0.95

# Of each layer, for each sample, each case's score: shares in [0, 1], or minus the nats of a text's token.
Scores = dict[str, list[list[float]]]


@dataclass(frozen=True, kw_only=True)
class LayerCases:
    """What one model is asked: of each layer a list of cases for each of SEEDS."""

    asked: Mapping[LayerName, Sequence[Sequence[Case]]]
    # Where the tokenizer and its template lie.
    checkpoint: Path

    def digest(self) -> str:
        """Of all that is asked: scores of another digest are those of other cases."""
        told = msgspec.json.encode(list(self.asked.items()), order="deterministic")
        return hashlib.sha256(told).hexdigest()[:16]


def layer_cases(checkpoint: Path, window: int, *, tools: bool, times: int = 1) -> LayerCases:
    """The cases of a model, `times` those of the costliest. Needles lie in texts of up to `window` tokens."""
    asked: dict[LayerName, list[list[Case]]] = {
        "task": [_tasks(seed, times * TASKS) for seed in SEEDS],
        "structure": [_structures(seed, times * STRUCTURES, tools=tools) for seed in SEEDS],
        "long_context": [_needles(seed, times * NEEDLES, window) for seed in SEEDS],
        "behaviour": [_behaviours(seed, times * BEHAVIOURS) for seed in SEEDS],
    }
    return LayerCases(asked=asked, checkpoint=checkpoint)


def _tasks(seed: int, count: int) -> list[Case]:
    return to_cases(lines_of("task", seed, count), "task", TaskLayer(max_tokens=40), seed)


def _behaviours(seed: int, count: int) -> list[Case]:
    lines = lines_of("behaviour", seed, count)
    return to_cases(lines, "behaviour", BehaviourLayer(max_tokens=40), seed)


def _needles(seed: int, repeats: int, window: int) -> list[Case]:
    return needles(
        seed,
        window=window,
        chars_per_token=_CHARS_PER_TOKEN,
        lengths=LENGTHS,
        depths=DEPTHS,
        repeats=repeats,
        kinds=("single", "distractors", "several", "cited"),
        max_tokens=32,
    )


def _structures(seed: int, count: int, *, tools: bool) -> list[Case]:
    """Schemas that the prompt tells by the names of fields; and tools, half of the cases, where asked for."""
    schemas = count // 2 if tools else count
    # Every fourth task is an extraction.
    asked = (line for line in lines_of("task", seed, 4 * schemas) if line.check == "json")
    lines = [_under_schema(line) for line in asked]
    if tools:
        called = (line for line in lines_of("structure", seed, 4 * count) if line.check == "tool")
        lines += list(called)[: count - schemas]
    return to_cases(lines, "structure", StructureLayer(max_tokens=48), seed)


_KINDS = {str: "string", int: "integer"}


def _under_schema(line: CaseLine) -> CaseLine:
    """An extraction of which only the form is judged."""
    schema = {
        "type": "object",
        "properties": {name: {"type": _KINDS[type(value)]} for name, value in line.answer.items()},
        "required": list(line.answer),
        "additionalProperties": False,
    }
    return msgspec.structs.replace(line, check="schema", answer=schema, enforced=False)


# --- asking -----------------------------------------------------------------------------------------------


def ask(driver: Driver, cases: LayerCases) -> Scores:
    """Every case of the asked layers, through the engine's own runner."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(cases.checkpoint)
    found: dict[str, float] = {}
    every = [case for samples in cases.asked.values() for sample in samples for case in sample]
    for is_long, together in ((False, _TOGETHER), (True, _LONG_TOGETHER)):
        some = [case for case in every if (case.layer == "long_context") == is_long]
        for begin in range(0, len(some), together):
            found |= dict(_scored(driver, tokenizer, some[begin : begin + together]))
    return {
        layer: [[found[_name(case)] for case in sample] for sample in samples]
        for layer, samples in cases.asked.items()
    }


def _scored(driver: Driver, tokenizer: Any, cases: Sequence[Case]) -> Iterator[tuple[str, float]]:
    scorer = Scorer(seeds_hold=True)
    for case, job in zip(cases, driver.run([_job(tokenizer, case) for case in cases]), strict=True):
        answer = answer_of(tokenizer.decode(job.output, skip_special_tokens=False), case)
        yield _name(case), scorer.score(Pair(case=case, baseline=answer, candidate=answer)).candidate


def _name(case: Case) -> str:
    """Of a case among those of both samples; some ask the same."""
    return f"{case.layer} {case.key()} {case.answer}"


def _job(tokenizer: Any, case: Case) -> Job:
    prompt = tokenizer.apply_chat_template(
        case.body["messages"], tools=case.body.get("tools"), tokenize=False, add_generation_prompt=True
    )
    most = int(case.body["max_tokens"])
    return Job(
        tokenizer(prompt, add_special_tokens=False)["input_ids"],
        num_tokens=most,
        sampling=SamplingParams(temperature=0.0, max_tokens=most),
    )


def answer_of(written: str, case: Case) -> ServerAnswer:
    """What a server makes of a model's text: up to its end, calls of tools taken out."""
    text = written.partition(_END)[0]
    if not case.body.get("tools"):
        return ServerAnswer(text=text)
    parser, delta = PARSERS[_CALLS](str, ToolTypes(())), TextDelta()
    parser.feed(text, delta)
    parser.finish(delta)
    return ServerAnswer(text=text, calls=tuple(ToolInvocation(*call) for call in parser.calls()))


def of_texts(logprobs: NDArray[np.float64], said: Sequence[NDArray[np.bool_]]) -> list[list[float]]:
    """Mean log-probability of each text, every second text in another sample.

    `logprobs` are those of all texts' tokens but their first, one text behind another; `said` are those that
    count.
    """
    means, begin = [], 0
    for mask in said:
        counted = logprobs[begin : begin + len(mask) - 1][mask[1:]]
        begin += len(mask) - 1
        if len(counted):
            means.append(float(counted.mean()))
    return [means[part :: len(SEEDS)] for part in range(len(SEEDS))]


# --- comparing --------------------------------------------------------------------------------------------


def compared(found: Scores, baseline: Scores) -> dict[str, Any]:
    """Of each layer: cases, mean score, by how much it is above that of bfloat16, and within which bounds
    (paired bootstrap, 95 %); of each sample the bounds alone. In per cent; of texts, of perplexity.
    """
    return {layer: _compared(layer, found[layer], baseline[layer]) for layer in ALL}


def _compared(layer: str, found: list[list[float]], baseline: list[list[float]]) -> dict[str, Any]:
    samples = [
        [ours - theirs for ours, theirs in zip(*pair, strict=True)]
        for pair in zip(found, baseline, strict=True)
    ]
    whole = [each for sample in samples for each in sample]
    scores = [each for sample in found for each in sample]
    shown = _as_rise if layer == "intrinsic" else _as_share
    return {
        "cases": len(whole),
        "score": round(math.exp(-mean_of(scores)) if layer == "intrinsic" else 100 * mean_of(scores), 3),
        "change": shown(mean_of(whole)),
        "within": _within(bootstrap(whole, level=_LEVEL), shown),
        "samples": [_within(bootstrap(each, level=_LEVEL), shown) for each in samples],
    }


def _as_share(change: float) -> float:
    return round(100 * change, 1) + 0.0


def _as_rise(change: float) -> float:
    """Of log-probability, as that of perplexity in per cent."""
    return round(100 * (math.exp(-change) - 1), 2) + 0.0


def _within(bounds: MeanBounds, shown: Any) -> list[float]:
    return sorted((shown(bounds.lower), shown(bounds.upper)))


# --- the page ---------------------------------------------------------------------------------------------

_TITLES = {
    "intrinsic": "perplexity",
    "task": "task",
    "structure": "structure",
    "long_context": "long context",
    "behaviour": "behaviour",
}


def is_worse(layer: str, found: Mapping[str, Any]) -> bool:
    """Whether the whole interval is on the side of loss."""
    low, high = found["within"]
    return bool(low > 0 if layer == "intrinsic" else high < 0)


def worse_in(row: Mapping[str, Any]) -> str:
    """Names of the layers in which a form is worse beyond its interval; "none", or empty if not measured."""
    layers = row.get("layers")
    if not layers:
        return ""
    return ", ".join(_TITLES[name] for name in ALL if is_worse(name, layers[name])) or "none"


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each form changes in each layer, and whether both samples agree."""
    measured = [row for row in rows if row.get("layers")]
    if not measured:
        return
    baseline = measured[0]["layers"]
    yield ""
    heads = [f"{_TITLES[name]}, {baseline[name]['cases']} cases" for name in ALL]
    yield f"| form | {' | '.join(heads)} |"
    yield f"|{'---|' * (len(ALL) + 1)}"
    scores = [
        f"{baseline[name]['score']:.2f}" if name == "intrinsic" else f"{baseline[name]['score']:.0f} %"
        for name in ALL
    ]
    yield f"| {measured[0]['form']}, its own scores | {' | '.join(scores)} |"
    for row in measured[1:]:
        cells = [_cell(name, row["layers"][name]) for name in ALL]
        yield f"| {row['form']} | {' | '.join(cells)} |"
    yield ""
    yield _agreement(measured[1:])


def _cell(layer: str, found: Mapping[str, Any]) -> str:
    digits = 2 if layer == "intrinsic" else 0
    low, high = found["within"]
    text = f"{found['change']:+.{digits}f} % ({low:+.{digits}f} … {high:+.{digits}f})"
    return f"**{text}**" if is_worse(layer, found) else text


def _agreement(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which forms the two samples judge differently, beyond what their intervals allow."""
    apart = [
        f"{row['form']} in {_TITLES[name]}"
        for row in rows
        for name in ALL
        if _apart(*row["layers"][name]["samples"])
    ]
    total = len(rows) * len(ALL)
    said = f"The two samples' intervals overlap in {total - len(apart)} of {total} figures of this table"
    return f"{said}; not for {'; '.join(apart)}." if apart else f"{said}."


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[1] < other[0] or other[1] < one[0]
