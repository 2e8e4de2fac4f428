"""What forms of weights, keys and values do to answers: perplexity, agreement, a task score, and bytes.

    python -m benchmarks.quality_forms --json benchmarks/results/quality_forms.json
    python -m benchmarks.quality_forms --kept --json ...   # of rows that are kept; names those that lack
    python -m benchmarks.quality_forms --page     # docs/quality.md, of that record

The bundled model and SmolLM2-135M-Instruct, each in bfloat16, quantized at load, as `millrace quantize`
writes it by every scheme and method, in types of GGUF, and with keys and values of 8 bits. Held-out text is
the bundled model's evaluation split, of which perplexity counts the assistant's tokens; and, for SmolLM2,
every second topic of Python's own help (pydoc_data). Calibration is the training split, and the other topics.
"Agrees" is the share of positions whose likeliest token is that of bfloat16; tasks are the gate's generated
ones, answered greedily. Behind them come the gate's layers on two samples of other cases (`quality_layers`).

SmolLM2 is fetched in Q4_1 and turned dense, so its bfloat16 is that of weights which were rounded to 4 bits
once: what rounds them to 4 bits in groups of 32 again loses less than it would elsewhere.

Checkpoints and rows are kept in --work: the same command goes on where it was. Nothing here is a time, so the
machine need not be quiet.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks import quality_layers
from benchmarks.engine.report import options, publish
from benchmarks.quality_layers import LayerCases, Scores
from benchmarks.quantization import MIXTURE, SCORING, SEED, held_out
from checkpoint.files import find
from engine.config import CacheConfig, EngineConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import SamplingParams
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from models.corpus import documents
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.gate.cases import Case, Pair, ServerAnswer
from services.gate.generated import lines_of
from services.gate.lines import to_cases
from services.gate.scoring import Scorer
from services.gate.suite import TaskLayer
from services.quantize.calibration import read_calibration
from services.quantize.choices import CALIBRATED, METHODS, SCHEMES, MethodName, SchemeName, check_choice
from services.quantize.dense import write_dense
from services.quantize.run import QuantizeJob, choose_group, compress
from services.supervisor.config import BUNDLED_MODEL
from tests.unit.engine.quantization import gguf_writer, k_quants
from tests.unit.engine.runner.driver import Driver, Job

RECORD = Path("benchmarks/results/quality_forms.json")
PAGE = Path("docs/quality.md")
BASELINE, KEYS_AND_VALUES = "bfloat16", "keys and values"
# What a model was published in, and the form that rounds its dense weights in the same way.
PUBLISHED = {"GGUF Q4_1, as published": "GGUF Q4_1"}
# Both models were trained on this form of conversations.
_ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_END = "<|im_end|>"
_ANSWER_TOKENS = 40
_TOGETHER = 8
_TASK_SEED = 5
# AWQ runs each text through a layer some eighty times.
CALIBRATION_TEXTS, CALIBRATION_TOKENS = 48, 256
# Held-out texts of the second look, and windows of needles in tokens: a form of SmolLM2 takes about a minute.
_OTHER_DOCUMENTS, _OTHER_TOPICS = 96, 8
_WINDOWS = (1024, 512)
Text = tuple[list[int], NDArray[np.bool_]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model: its dense checkpoint, what is read, and what calibrates."""

    name: str
    checkpoint: Path
    arch: str
    texts: list[Text]
    calibration: Path
    # Also measured as it was fetched.
    published: Path | None = None
    # Of the gate's layers, and texts beside `texts`; none, and they are not measured.
    layers: LayerCases | None = None
    others: list[Text] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class QualityForm:
    """One form of a model. `make` writes a checkpoint unless it is there, and returns it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[], Path]


@dataclass(frozen=True)
class Measures:
    """Of every predicted token: log-probability and the likeliest; scores of tasks; bytes of weights."""

    logprobs: NDArray[np.float64]
    best: NDArray[np.int64]
    tasks: float
    weights_bytes: int


# --- the models -------------------------------------------------------------------------------------------


def bundled(work: Path, num_texts: int, num_tokens: int) -> Subject:
    """The bundled model; calibration is its training split."""
    calibration = work / "calibration.jsonl"
    source = documents(MIXTURE, SEED, "train")
    plain = (each for each in source if each.messages and not each.tools and _is_plain(each.messages))
    _write_lines(calibration, ({"messages": list(each.messages)} for each in islice(plain, 128)))
    texts = [(ids[:num_tokens], said[:num_tokens]) for ids, said in held_out(num_texts + _OTHER_DOCUMENTS)]
    return Subject(
        name=BUNDLED_MODEL.name,
        checkpoint=BUNDLED_MODEL,
        arch="qwen3",
        texts=texts[:num_texts],
        calibration=calibration,
        layers=quality_layers.layer_cases(BUNDLED_MODEL, _WINDOWS[0], tools=True, times=2),
        others=texts[num_texts:],
    )


def smollm2(work: Path, num_texts: int, num_tokens: int) -> Subject:
    """SmolLM2-135M-Instruct, fetched as a GGUF file and turned dense."""
    published = find("smollm2-135m")
    dense = work / "dense"
    if not dense.is_dir():
        write_dense(published, dense)
    tokenizer = Tokenizer.from_file(str(dense / "tokenizer.json"))
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 1000]
    calibration = work / "calibration.jsonl"
    _write_lines(calibration, ({"text": text[:6000]} for text in topics[::2]))
    ids = [tokenizer.encode(text).ids for text in topics[1::2][:num_texts]]
    # What follows in the longer ones: there are no more topics that did not calibrate.
    further = [each[num_tokens : 2 * num_tokens] for each in ids if len(each) >= 2 * num_tokens]
    texts, others = (
        [(each[:num_tokens], np.ones(len(each[:num_tokens]), bool)) for each in some]
        for some in (ids, further[:_OTHER_TOPICS])
    )
    return Subject(
        name="SmolLM2-135M-Instruct",
        checkpoint=dense,
        arch="llama",
        texts=texts,
        calibration=calibration,
        published=published,
        layers=quality_layers.layer_cases(dense, _WINDOWS[1], tools=False),
        others=others,
    )


def _is_plain(messages: Sequence[dict[str, Any]]) -> bool:
    return all(isinstance(each.get("content"), str) and not each.get("tool_calls") for each in messages)


def _write_lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


SUBJECTS: dict[str, Callable[[Path, int, int], Subject]] = {"bundled": bundled, "smollm2-135m": smollm2}


# --- the forms --------------------------------------------------------------------------------------------


def forms(subject: Subject, work: Path) -> Iterator[QualityForm]:
    """bfloat16 first: everything is compared with it."""

    def dense() -> Path:
        return subject.checkpoint

    yield QualityForm(name=BASELINE, make=dense)
    for quantize in ("int8", "w8a8", "int4"):
        yield QualityForm(name=f"{quantize} at load", options={"quantize": quantize}, make=dense)
    for kind in ("int8", "fp8", BY_CHANNEL):
        cache = {"kv_dtype": kind, "block_size": KEY_GROUP}
        yield QualityForm(name=f"{kind} {KEYS_AND_VALUES}", options={"cache": cache}, make=dense)
    for scheme in SCHEMES:
        for method in METHODS:
            if _goes_together(scheme, method):
                make = partial(_quantized, subject, work, scheme, method)
                yield QualityForm(name=f"{scheme}, {method}", make=make)
    if subject.published is not None:
        published = subject.published
        yield from (QualityForm(name=name, make=lambda: published) for name in PUBLISHED)
    for kind in (Kind.Q8_0, Kind.Q6_K, Kind.Q4_K, Kind.Q4_1, Kind.Q4_0):
        if kind in (Kind.Q8_0, Kind.Q4_1, Kind.Q4_0) or subject.arch == "qwen3":
            yield QualityForm(name=f"GGUF {kind.name}", make=partial(_gguf, subject, work, kind))


Forms = Callable[[Subject, Path], Iterator[QualityForm]]


def _goes_together(scheme: SchemeName, method: MethodName) -> bool:
    try:
        check_choice(scheme, method, "texts")
    except ConfigError:
        return False
    return True


def _quantized(subject: Subject, work: Path, scheme: SchemeName, method: MethodName) -> Path:
    """The folder that `millrace quantize` writes, without its gate."""
    out = work / f"{scheme}-{method}"
    if out.exists():
        return out
    texts = (
        read_calibration(str(subject.calibration), divided=False, most=CALIBRATION_TEXTS)
        if method in CALIBRATED
        else None
    )
    job = QuantizeJob(
        model=subject.name,
        checkpoint=subject.checkpoint,
        scheme=scheme,
        method=method,
        group_size=choose_group(subject.checkpoint, scheme, None),
        out=out,
        calibration=texts,
        max_tokens=CALIBRATION_TOKENS,
    )
    compress(job, lambda found, folder: None, Console().print, lambda layer: None)
    return out


def _gguf(subject: Subject, work: Path, kind: Kind) -> Path:
    """The dense weights rounded to nearest by the `gguf` package, or by the tests' K-quants."""
    path = work / f"{kind.name}.gguf"
    if path.exists():
        return path
    model = transformers.AutoModelForCausalLM.from_pretrained(subject.checkpoint, dtype=torch.float32)
    settings = json.loads((subject.checkpoint / "config.json").read_text())
    kinds = {"token_embd": Kind.Q8_0}
    if kind in (Kind.Q4_K, Kind.Q6_K):
        # Its rows are no multiple of 256.
        kinds["ffn_down"] = Kind.Q8_0
    rounded = {Kind.Q4_K: k_quants.q4_k, Kind.Q6_K: k_quants.q6_k}
    partial_path = path.with_suffix(".part")
    gguf_writer.write(
        partial_path,
        model,
        subject.arch,
        {**kinds, "": kind},
        rope_theta=settings["rope_theta"],
        rounded=rounded,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(subject.checkpoint / name, work / name)
    partial_path.rename(path)
    return path


# --- measuring --------------------------------------------------------------------------------------------


def measure(subject: Subject, checkpoint: Path, chosen: dict[str, Any], cases: Sequence[Case]) -> Measures:
    """Runs texts and tasks through the engine's own runner."""
    with _opened(checkpoint, chosen) as (driver, weights_bytes):
        logprobs, best = _scored(driver, [ids for ids, _ in subject.texts])
        tasks = _tasks(driver, Tokenizer.from_file(str(subject.checkpoint / "tokenizer.json")), cases)
    return Measures(logprobs, best, tasks, weights_bytes)


def measure_layers(subject: Subject, checkpoint: Path, chosen: dict[str, Any]) -> Scores:
    """Scores of the gate's layers, case by case."""
    assert subject.layers is not None
    with _opened(checkpoint, chosen) as (driver, _):
        logprobs, _ = _scored(driver, [ids for ids, _ in subject.others])
        texts = quality_layers.of_texts(logprobs, [said for _, said in subject.others])
        return {"intrinsic": texts, **quality_layers.ask(driver, subject.layers)}


@contextmanager
def _opened(checkpoint: Path, chosen: dict[str, Any]) -> Iterator[tuple[Driver, int]]:
    """The engine's own runner, and the bytes of its weights."""
    cache = CacheConfig(kv_cache_bytes=256 << 20, **chosen.get("cache", {}))
    given = {key: value for key, value in chosen.items() if key != "cache"}
    config = EngineConfig(**{"dtype": "bfloat16", "cache": cache, **given})
    runner, plan, _ = build_here(config, ModelConfig(path=str(checkpoint)), lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    with closing(runner):
        yield Driver(runner), plan.weights_bytes


def _scored(driver: Driver, prompts: Sequence[list[int]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    entries = [
        entry
        for prompt in prompts
        for entry in driver.run([Job(prompt, num_tokens=1, sampling=SCORING)])[0].prompt_logprobs
    ]
    best = [entry.top_ids[0] for entry in entries]
    return np.array([entry.logprob for entry in entries]), np.array(best)


def _tasks(driver: Driver, tokenizer: Tokenizer, cases: Sequence[Case]) -> float:
    """Mean score of greedy answers, in [0, 1]."""
    scorer, scores = Scorer(seeds_hold=True), []
    greedy = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    for begin in range(0, len(cases), _TOGETHER):
        some = cases[begin : begin + _TOGETHER]
        prompts = [_ASKED.format(case.body["messages"][0]["content"]) for case in some]
        ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        jobs = driver.run([Job(each, num_tokens=_ANSWER_TOKENS, sampling=greedy) for each in ids])
        for case, job in zip(some, jobs, strict=True):
            said = tokenizer.decode(job.output, skip_special_tokens=False).partition(_END)[0]
            answer = ServerAnswer(text=said)
            scores.append(scorer.score(Pair(case=case, baseline=answer, candidate=answer)).candidate)
    return float(np.mean(scores))


def row_of(subject: Subject, name: str, found: Measures, baseline: Measures) -> dict[str, Any]:
    """The figures of a form beside those of bfloat16."""
    said = np.concatenate([mask[1:] for _, mask in subject.texts])
    return {
        "model": subject.name,
        "form": name,
        "perplexity": round(math.exp(-float(found.logprobs[said].mean())), 4),
        "agrees %": round(100 * float((found.best == baseline.best)[said].mean()), 2),
        "task %": round(100 * found.tasks, 1),
        "weights MiB": round(found.weights_bytes / 2**20, 2),
    }


class KeptRows:
    """Rows as they come, in a file of the work folder; those of other settings count as none. Runs of other
    forms may go on beside.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self._path, self._settings = path, settings
        self.rows = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        known = json.loads(self._path.read_text()) if self._path.is_file() else {}
        return dict(known.get(self._settings, {}))

    def put(self, name: str, row: dict[str, Any]) -> None:
        self.rows = self._read() | {name: row}
        partial_path = self._path.with_suffix(".part")
        partial_path.write_text(json.dumps({self._settings: self.rows}, indent=1))
        partial_path.rename(self._path)


def run(
    subject: Subject,
    work: Path,
    cases: Sequence[Case],
    settings: str,
    only: str = "",
    made: Forms = forms,
) -> Iterator[dict[str, Any]]:
    """A row for each of the forms that are `made` whose name holds `only`, and for bfloat16, the first."""
    kept = KeptRows(work / "rows.json", settings)
    baseline: Measures | None = None
    for form in made(subject, work):
        if only not in form.name and form.name != BASELINE:
            continue
        if form.name not in kept.rows:
            if baseline is None and form.name != BASELINE:
                baseline = measure(subject, subject.checkpoint, {}, cases)
            found = measure(subject, form.make(), dict(form.options), cases)
            baseline = baseline or found
            kept.put(form.name, row_of(subject, form.name, found, baseline))
        row = kept.rows[form.name]
        if subject.layers is not None and row.get("asked") != subject.layers.digest():
            row["scores"] = measure_layers(subject, form.make(), dict(form.options))
            row["asked"] = subject.layers.digest()
            kept.put(form.name, row)
        row = _with_layers(row, kept.rows[BASELINE])
        Console().print(_flat(row))
        yield row


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what stands within its figures."""
    return {key: value for key, value in row.items() if key != "layers"}


def _with_layers(row: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """A kept row as it is published: compared with bfloat16 instead of its scores."""
    shown = {key: value for key, value in row.items() if key not in ("scores", "asked")}
    if "asked" not in row or row["asked"] != baseline.get("asked"):
        return shown
    layers = quality_layers.compared(row["scores"], baseline["scores"])
    columns = {f"{name} %": round(layers[name]["score"], 1) for name in quality_layers.NEW}
    return {**shown, **columns, "layers": layers}


def kept_rows(subject: Subject, work: Path, settings: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows that there are, in the order of `forms`, and the names of those that are not measured."""
    rows = KeptRows(work / "rows.json", settings).rows
    names = [form.name for form in forms(subject, work)]
    shown = {name: _with_layers(row, rows[BASELINE]) for name, row in rows.items()}
    return [shown[name] for name in names if name in rows], [name for name in names if name not in rows]


# --- the page ---------------------------------------------------------------------------------------------

_HEAD = """# Which form of a model to serve

Each model has three tables. The first answers: by how much may perplexity rise, and which form of weights is
then the smallest; and what else is it worse in? The second has perplexity of held-out text and its rise over
bfloat16; "agrees", the share of positions whose likeliest token is that of bfloat16; "task", the share of
{tasks} generated tasks that are answered right, where a few per cent are noise; bytes of weights in memory.
The third has the [gate's](gate.md) layers on other cases and other texts, as a change from bfloat16 with its
interval of 95 % (paired, case by case). **Bold** is worse beyond its interval, one in forty of it by chance.

1. Take the model that is more like yours: small models lose more than large ones.
2. A form "at load" is `--quantize`, and needs no other file; "int4, gptq" is `millrace quantize MODEL
   --scheme int4 --method gptq` ([how](quantize.md)); "keys and values" is `engine.cache.kv_dtype`, a choice
   beside that of weights, which multiplies the streams that fit. Take `int8`; `kivi4` (`block_size = 64`)
   where streams are longer than about 250 tokens, below which each one's newest keys, which are whole, take
   more than it spares, and a point of perplexity is bearable: in SmolLM2 1.3 %, and 0.8 % with the worst four
   layers in `int8` (`engine.cache.kv_dtype_layers`; `python -m benchmarks.kv_layers` finds them).
3. Take `int8` first: of 8 bits it rises least, and `w8a8` is for processors that multiply integers faster. Of
   4 bits take the method that rises least: rounding alone (`rtn`, "int4 at load") is the one to avoid where a
   row of `gptq` or `awq` is far below it.
4. Let [the gate](gate.md) decide with your own cases. Two small models are no promise for yours.

Of the layers: "structure" is JSON under a schema, and of the bundled model also which tool is called, if any,
with which arguments, all without a grammar that leads the answer, because with one every form is valid.
SmolLM2-135M calls no tool as it is, and what `int8` costs it hangs on one token: whether it ends behind the
object, or goes on to explain it. "Long context" is needles, alone, among distractors, three at once, and with
the section cited, in texts of {windows[0]:,} tokens (SmolLM2: {windows[1]}), at beginning, middle and end.
"Behaviour" is refusals, language and format. Cases are drawn by two seeds, and every second text is of the
other sample: the third table's last line says which figures the two samples contradict each other in.
"""
# In per cent of bfloat16's perplexity.
_RISES = (0.5, 2, 10)


def _rise(row: dict[str, Any], baseline: dict[str, Any]) -> float:
    """By how many per cent perplexity is above that of bfloat16; no zero has a sign."""
    return round(100 * (row["perplexity"] / baseline["perplexity"] - 1), 2) + 0.0


def smallest(rows: Sequence[dict[str, Any]], rise: float) -> dict[str, Any]:
    """The row of the form whose weights are smallest, of those whose perplexity rises by `rise` % at most.

    Where a model was published rounded, what keeps that rounding loses nothing by it: it is left out.
    """
    baseline = next(row for row in rows if row["form"] == BASELINE)
    kept = {
        name for row in rows if row["form"] in PUBLISHED for name in (row["form"], PUBLISHED[row["form"]])
    }
    chosen = [row for row in rows if row["form"] not in kept and not row["form"].endswith(KEYS_AND_VALUES)]
    fits = [row for row in chosen if _rise(row, baseline) <= rise]
    return min(fits, key=lambda row: (row["weights MiB"], row["perplexity"]))


def _tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    baseline = next(row for row in rows if row["form"] == BASELINE)
    yield from ("| rise of at most | smallest form | rise | weights | worse in |", "|---|---|---|---|---|")
    for rise in _RISES:
        row = smallest(rows, rise)
        share = row["weights MiB"] / baseline["weights MiB"]
        yield (
            f"| {rise:g} % | {row['form']} | {_rise(row, baseline):+.2f} % | {share:.0%} of bfloat16's "
            f"| {quality_layers.worse_in(row)} |"
        )
    yield from ("", "| form | perplexity | rise | agrees | task | weights |", "|---|---|---|---|---|---|")
    for row in rows:
        yield (
            f"| {row['form']} | {row['perplexity']:.3f} | {_rise(row, baseline):+.2f} % "
            f"| {row['agrees %']:.1f} % | {row['task %']:.0f} % | {row['weights MiB']:.1f} MiB |"
        )
    yield from quality_layers.table(rows)


def page(record: dict[str, Any]) -> str:
    """docs/quality.md."""
    lines, rows = [_HEAD.format(tasks=record["tasks"], windows=_WINDOWS)], record["rows"]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += [f"## {model}", "", *_tables([row for row in rows if row["model"] == model]), ""]
    lines.append(
        f"{record['notes']} Measured by `python -m benchmarks.quality_forms`; `--page` makes this page of "
        "its record."
    )
    return "\n".join(lines).rstrip() + "\n"


_NOTES = (
    "SmolLM2 is published in Q4_1 here and was turned dense, so its bfloat16 was rounded to 4 bits once: "
    "forms of 4 bits in groups of 32 lose less than they would of the original. fp8 is float8 weights alone "
    f"on a CPU. Calibration: {CALIBRATION_TEXTS} texts, {CALIBRATION_TOKENS} tokens of each at most."
)


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/quality"), help="where checkpoints and rows are kept"
    )
    parser.add_argument("--models", nargs="+", choices=tuple(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument(
        "--texts", type=int, default=24, help="held-out, of SmolLM2; eight times so many of the bundled"
    )
    parser.add_argument("--tokens", type=int, default=384, help="of each, at most")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--only", default="", help="part of the names of the forms to measure")
    parser.add_argument(
        "--kept", action="store_true", help="publish what is kept in --work, and measure nothing"
    )
    parser.add_argument("--page", action="store_true", help=f"write {PAGE} of {RECORD}, and measure nothing")
    return parser.parse_args()


def _lacks(subject: Subject, how: str, names: Sequence[str]) -> str:
    return f" Not measured {how}yet of {subject.name}: {'; '.join(names)}." if names else ""


def main() -> None:
    given = _arguments()
    if given.page:
        PAGE.write_text(page(json.loads(RECORD.read_text())), encoding="utf-8")
        return
    cases = to_cases(lines_of("task", _TASK_SEED, given.tasks), "task", TaskLayer(), _TASK_SEED)
    settings = f"{given.texts} {given.tokens} {given.tasks}"
    rows: list[dict[str, Any]] = []
    notes = _NOTES
    for name in given.models:
        work = given.work / name
        work.mkdir(parents=True, exist_ok=True)
        num_texts = given.texts * (8 if name == "bundled" else 1)
        subject = SUBJECTS[name](work, num_texts, given.tokens)
        if given.kept:
            kept, lacking = kept_rows(subject, work, settings)
            rows += kept
            notes += _lacks(subject, "", lacking)
            notes += _lacks(subject, "by layers ", [row["form"] for row in kept if "layers" not in row])
        else:
            rows += run(subject, work, cases, settings, given.only)
    title = "Forms of weights, keys and values: what they do to answers"
    publish(title, [_flat(row) for row in rows], given.json, notes)
    if given.json is not None:
        record = json.loads(given.json.read_text()) | {"tasks": given.tasks, "rows": rows}
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


if __name__ == "__main__":
    main()
