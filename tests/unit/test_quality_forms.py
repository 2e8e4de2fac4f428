"""What the benchmark of quality keeps between runs, and the page that it makes of its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality_forms import KeptRows, Measures, Subject, kept_rows, page, row_of, smallest
from benchmarks.quality_layers import ALL


def row(model: str, form: str) -> dict[str, Any]:
    return {
        "model": model,
        "form": form,
        "perplexity": 1.2345,
        "agrees %": 99.55,
        "task %": 62.5,
        "weights MiB": 7.25,
    }


def test_rows_of_the_same_settings_are_not_measured_again(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path / "rows.json", "24 384 64")
    kept.put("int8", row("m", "int8"))
    assert KeptRows(tmp_path / "rows.json", "24 384 64").rows == {"int8": row("m", "int8")}
    assert KeptRows(tmp_path / "rows.json", "2 384 64").rows == {}


def test_a_row_counts_what_is_said_alone(tmp_path: Path) -> None:
    said = np.array([False, False, True, True])
    subject = Subject(
        name="m",
        checkpoint=tmp_path,
        arch="llama",
        texts=[([1, 2, 3, 4], said)],
        calibration=tmp_path,
    )
    baseline = Measures(np.array([-9.0, 0.0, 0.0]), np.array([1, 2, 3]), 1.0, 2 << 20)
    other = Measures(np.array([-5.0, -0.5, -0.5]), np.array([7, 2, 9]), 0.25, 1 << 20)
    found = row_of(subject, "int4", other, baseline)
    assert found == {
        "model": "m",
        "form": "int4",
        "perplexity": 1.6487,
        "agrees %": 50.0,
        "task %": 25.0,
        "weights MiB": 1.0,
    }


def test_what_keeps_a_published_rounding_is_no_form_to_choose() -> None:
    rows = [row("m", form) for form in ("bfloat16", "GGUF Q4_1, as published", "GGUF Q4_1", "int8 at load")]
    rows[-1]["weights MiB"] = 9.0
    assert smallest(rows, 1)["form"] == "bfloat16"
    # Of a model that was published in full it is one as any other.
    assert smallest([rows[0] | {"weights MiB": 16.0}, rows[2]], 1)["form"] == "GGUF Q4_1"


def test_scores_of_layers_are_published_as_compared(tmp_path: Path) -> None:
    def kept(*forms: str) -> dict[str, dict[str, Any]]:
        scores = {name: [[1.0, 0.0], [1.0]] for name in ALL}
        return {form: row("m", form) | {"scores": scores, "asked": "cases"} for form in forms}

    rows = kept("bfloat16", "int8 at load", "w8a8 at load")
    rows["w8a8 at load"]["asked"] = "others"
    for name, each in rows.items():
        KeptRows(tmp_path / "rows.json", "24 384 64").put(name, each)
    subject = Subject(name="m", checkpoint=tmp_path, arch="llama", texts=[], calibration=tmp_path)
    found, lacking = kept_rows(subject, tmp_path, "24 384 64")
    assert found[1]["structure %"] == 66.7
    assert found[1]["layers"]["structure"]["within"] == [0.0, 0.0]
    assert not {"scores", "asked"} & found[1].keys()
    assert "layers" not in found[2]
    assert "w8a8 at load" not in lacking
    assert "int4 at load" in lacking


def test_the_page_names_the_smallest_form_for_each_rise_and_shows_all() -> None:
    small = [
        row("small", "bfloat16") | {"perplexity": 2.0, "weights MiB": 16.0},
        row("small", "int8 at load") | {"perplexity": 2.004, "weights MiB": 9.0},
        # The smallest of all, which says nothing of weights.
        row("small", "int8 keys and values") | {"perplexity": 2.0, "weights MiB": 1.0},
        row("small", "int4, gptq") | {"perplexity": 2.1, "weights MiB": 5.0},
        row("small", "int4, rtn") | {"perplexity": 2.9, "weights MiB": 4.0},
    ]
    text = page({"rows": [*small, row("large", "bfloat16")], "notes": "A note.", "tasks": 64})
    assert text.index("## small") < text.index("## large")
    chosen = ["| 0.5 % | int8 at load | +0.20 % | 56% of bfloat16's |  |"]
    chosen += ["| 2 % | int8 at load | +0.20 % | 56% of bfloat16's |  |"]
    chosen += ["| 10 % | int4, gptq | +5.00 % | 31% of bfloat16's |  |"]
    assert "\n".join(chosen) in text
    assert "| int4, rtn | 2.900 | +45.00 % | 99.5 % | 62 % | 4.0 MiB |" in text
    assert "64 generated tasks" in text
    assert "A note." in text
