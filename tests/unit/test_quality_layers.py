"""The gate's layers of forms: what is asked, how answers are read, and what the page says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality_layers import (
    ALL,
    SEEDS,
    Scores,
    answer_of,
    compared,
    layer_cases,
    of_texts,
    table,
    worse_in,
)
from services.gate.cases import Case, Pair
from services.gate.scoring import Scorer


def scores(share: float, nats: float = 2.0) -> Scores:
    """20 cases of each sample and layer, of which `share` are right."""
    right = round(20 * share)
    sample = [1.0] * right + [0.0] * (20 - right)
    return {name: [[-nats] * 20 if name == "intrinsic" else sample] * 2 for name in ALL}


def row(form: str, found: Scores) -> dict[str, Any]:
    return {"form": form, "layers": compared(found, scores(0.75))}


def score_of(case: Case, written: str) -> float:
    answer = answer_of(written, case)
    return Scorer(seeds_hold=True).score(Pair(case=case, baseline=answer, candidate=answer)).candidate


@pytest.mark.parametrize("tools", [False, True])
def test_samples_are_of_one_size_and_ask_otherwise(tmp_path: Path, tools: bool) -> None:
    cases = layer_cases(tmp_path, 512, tools=tools, times=2)
    for one, other in cases.asked.values():
        assert len(one) == len(other) >= 24
        assert {case.key() for case in one} != {case.key() for case in other}
    assert {case.check for sample in cases.asked["structure"] for case in sample} == (
        {"schema", "tool"} if tools else {"schema"}
    )
    assert len(cases.asked) == len(ALL) - 1
    assert len(SEEDS) == 2


def test_scores_of_other_cases_are_known_as_such(tmp_path: Path) -> None:
    digests = {
        layer_cases(tmp_path, window, tools=tools).digest()
        for window in (512, 1024)
        for tools in (False, True)
    }
    assert len(digests) == 4
    assert layer_cases(tmp_path / "other", 512, tools=False).digest() in digests


def test_nothing_guides_a_schema_and_only_its_form_is_judged(tmp_path: Path) -> None:
    case = layer_cases(tmp_path, 512, tools=False).asked["structure"][0][0]
    assert "response_format" not in case.body
    assert score_of(case, '{"name": "A", "age": 3, "city": "B", "job": "C"}<|im_end|> and more') == 1.0
    assert score_of(case, '{"name": "A", "age": "3", "city": "B", "job": "C"}<|im_end|>') == 0.0
    assert score_of(case, 'Here: {"name": "A", "age": 3, "city": "B", "job": "C"}') == 0.0


def test_calls_are_taken_out_of_what_is_written(tmp_path: Path) -> None:
    asked = layer_cases(tmp_path, 512, tools=True).asked["structure"][0]
    case = next(case for case in asked if case.answer and "name" in case.answer and "tools" in case.body)
    name, arguments = case.answer["name"], str(case.answer["arguments"]).replace("'", '"')
    called = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    assert score_of(case, called) == 1.0
    assert score_of(case, "I do not know.<|im_end|>") == 0.0


def test_texts_have_a_mean_each_of_what_counts() -> None:
    said = [np.array(mask) for mask in ([False, False, True], [False, True, True, True], [False, False])]
    logprobs = np.array([-9.0, -1.0, -2.0, -4.0, -6.0, -9.0])
    assert of_texts(logprobs, said) == [[-1.0], [-4.0]]


def test_a_loss_beyond_its_interval_is_named_and_bold() -> None:
    equal, lost = row("int8", scores(0.75)), row("int4", scores(0.25, nats=2.5))
    assert worse_in(equal) == "none"
    assert worse_in(lost) == "perplexity, task, structure, long context, behaviour"
    assert worse_in({"form": "nf4"}) == ""
    lines = list(table([row("bfloat16", scores(0.75)), equal, lost, {"form": "nf4"}]))
    assert "| form | perplexity, 40 cases | task, 40 cases |" in lines[1]
    assert lines[3].startswith("| bfloat16, its own scores | 7.39 | 75 % |")
    assert lines[4].startswith("| int8 | +0.00 % (+0.00 … +0.00) | +0 % (+0 … +0) |")
    assert lines[5].startswith("| int4 | **+64.87 % (+64.87 … +64.87)** | **-50 % (")
    assert lines[-1].endswith("overlap in 10 of 10 figures of this table.")


def test_samples_that_contradict_each_other_are_named() -> None:
    found = scores(0.75)
    found["task"] = [[1.0] * 20, [0.0] * 20]
    said = list(table([row("bfloat16", scores(0.75)), row("int4", found)]))[-1]
    assert said.endswith("overlap in 4 of 5 figures of this table; not for int4 in task.")
