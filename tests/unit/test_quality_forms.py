"""What the benchmark of quality keeps between runs, and the page that it makes of its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality_forms import KeptRows, Measures, Subject, page, row_of


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


def test_the_page_has_a_table_for_each_model() -> None:
    rows = [row("small", "bfloat16"), row("small", "int4, gptq"), row("large", "bfloat16")]
    text = page({"rows": rows, "notes": "A note.", "tasks": 64})
    assert text.index("## small") < text.index("## large") < text.index("## How to choose")
    assert "| int4, gptq | 1.234 | 99.5 % | 62 % | 7.2 MiB |" in text
    assert "of 64 generated tasks" in text
    assert "A note." in text
