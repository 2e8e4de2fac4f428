"""What training makes of a model that serving has made cheaper: `models/recipes` on the bundled one.

    python -m benchmarks.training_forms --json benchmarks/results/training_forms.json

Each recipe is shown beside the same change without its training, and quantization-aware training beside as
many steps of training without rounding. Measured as `benchmarks.quality_forms` does, on held-out text and
tasks. Checkpoints and rows are kept in --work: the same command goes on where it was. Nothing here is a
time, so the machine need not be quiet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.engine.report import options, publish
from benchmarks.quality_forms import BASELINE, QualityForm, Subject, bundled, run
from benchmarks.quantization import MIXTURE, SEED
from engine.config import CacheConfig, EngineConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import SamplingParams
from models.chat_format import segments
from models.corpus import CorpusDocument, documents
from models.recipes import distillation, pruning, quantization_aware
from models.recipes.distillation import Teaching
from models.recipes.fine_tune import Course
from runtime.config import ModelConfig
from services.gate.generated import lines_of
from services.gate.lines import to_cases
from services.gate.suite import TaskLayer
from services.supervisor.config import BUNDLED_MODEL
from tests.unit.engine.runner.driver import Driver, Job

_INT4 = {"quantize": "int4"}
_GROUP_SIZE = EngineConfig().quantization.group_size
# Of the bundled model's six.
_STUDENT_LAYERS = 4
_ANSWER_TOKENS = 200
_TOGETHER = 8


def forms(course: Course, num_answers: int, subject: Subject, work: Path) -> Iterator[QualityForm]:
    """bfloat16 first: everything is compared with it."""
    data, model = work / "lessons.jsonl", subject.checkpoint
    course, none = replace(course, data=data), replace(course, data=data, steps=0)

    def form(name: str, make: Callable[[Path], object] | None = None, **chosen: Any) -> QualityForm:
        def made() -> Path:
            if make is None:
                return model
            out = work / name.replace(" ", "-").replace(",", "").replace(":", "of")
            if not (out / "model.safetensors").exists():
                make(out)
            return out

        return QualityForm(name=name, make=made, options=chosen)

    def taught(name: str, course: Course, **teaching: Any) -> QualityForm:
        student = Teaching(layers=_STUDENT_LAYERS, **teaching)
        return form(name, lambda out: distillation.train(model, out, course, student))

    yield form(BASELINE)
    yield form("int4 at load", None, **_INT4)
    yield form(
        "int4 at load, trained without rounding",
        lambda out: distillation.train(model, out, course, Teaching()),
        **_INT4,
    )
    yield form(
        "int4 at load, trained with rounding",
        lambda out: quantization_aware.train(model, out, course, _GROUP_SIZE),
        **_INT4,
    )
    for pattern in ("2:4", "50%"):
        for name, lessons in (("not trained", none), ("trained", course)):
            train = partial(pruning.train, model, course=lessons, pattern=pattern)
            yield form(f"pruned {pattern}, {name}", train)
    yield taught(f"{_STUDENT_LAYERS} layers of 6, not trained", none)
    yield taught(f"{_STUDENT_LAYERS} layers of 6, trained", course)
    yield taught(f"{_STUDENT_LAYERS} layers of 6, by probabilities", course, teacher=model)
    answers = work / "answers.jsonl"
    if not answers.exists():
        write_answers(model, data, answers, num_answers)
    yield taught(f"{_STUDENT_LAYERS} layers of 6, by answers", replace(course, data=answers))


def write_lessons(path: Path, number: int) -> None:
    """Conversations of the training split that end with an answer."""
    source = documents(MIXTURE, SEED, "train")
    ended = (each for each in source if each.messages and each.messages[-1]["role"] == "assistant")
    rows = ({"messages": list(each.messages), "tools": list(each.tools)} for each in islice(ended, number))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_answers(model: Path, lessons: Path, path: Path, number: int) -> None:
    """The same conversations with the model's own greedy answers at their ends, of those that end in time:
    what `millrace distill export` writes of a served one.
    """
    rows = [json.loads(line) for line in lessons.read_text(encoding="utf-8").splitlines()[:number]]
    plain = [row for row in rows if not row["tools"] and "tool_calls" not in row["messages"][-1]]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    greedy = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    config = EngineConfig(dtype="bfloat16", cache=CacheConfig(kv_cache_bytes=256 << 20))
    runner, _, _ = build_here(config, ModelConfig(path=str(model)), lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    unfinished = path.with_suffix(".part")
    with closing(runner), unfinished.open("w", encoding="utf-8") as file:
        driver = Driver(runner)
        for begin in range(0, len(plain), _TOGETHER):
            some = plain[begin : begin + _TOGETHER]
            prompts = [tokenizer.encode(_prompt(row), add_special_tokens=False).ids for row in some]
            jobs = driver.run([Job(ids, num_tokens=_ANSWER_TOKENS, sampling=greedy) for ids in prompts])
            for row, job in zip(some, jobs, strict=True):
                if end in job.output:
                    said = tokenizer.decode(job.output[: job.output.index(end)], skip_special_tokens=False)
                    answer = {"role": "assistant", "content": said}
                    file.write(json.dumps({"messages": [*row["messages"][:-1], answer]}) + "\n")
    unfinished.rename(path)


def _prompt(row: dict[str, Any]) -> str:
    """What the last answer follows, by the layout that the model was trained on."""
    document = CorpusDocument(task="", messages=tuple(row["messages"]))
    parts: Sequence[tuple[str, bool]] = list(segments(document))
    last = max(index for index, (_, trained) in enumerate(parts) if trained)
    return "".join(text for text, _ in parts[:last])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="where all is kept")
    parser.add_argument("--steps", type=int, default=400, help="of training, of each")
    parser.add_argument("--lessons", type=int, default=6144, help="conversations that are learned from")
    parser.add_argument("--answers", type=int, default=2048, help="of those, that the teacher answers anew")
    parser.add_argument("--texts", type=int, default=192, help="held-out")
    parser.add_argument("--tasks", type=int, default=192)
    given = parser.parse_args()
    work: Path = given.work
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "lessons.jsonl").exists():
        write_lessons(work / "lessons.jsonl", given.lessons)
    cases = to_cases(lines_of("task", 5, given.tasks), "task", TaskLayer(), 5)
    course = Course(data=work / "lessons.jsonl", steps=given.steps)
    settings = f"{given.steps} {given.lessons} {given.answers} {given.texts} {given.tasks}"
    made = partial(forms, course, given.answers)
    rows = list(run(bundled(work, given.texts, 384), work, cases, settings, made=made))
    notes = f"{BUNDLED_MODEL.name}; {given.steps} steps of training each, {given.lessons} conversations."
    publish("Forms of a model that training makes", rows, given.json, notes)


if __name__ == "__main__":
    main()
