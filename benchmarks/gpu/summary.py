"""What was wanted beside what was measured, from the parts' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def summarize(folder: Path) -> list[dict[str, Any]]:
    """Writes FOLDER/gpu-summary.json and returns its lines; what was not measured says so."""
    found = {
        path.stem.removeprefix("gpu-"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("gpu-*.json"))
        if path.stem != "gpu-summary"
    }
    rows = {name: part["rows"] for name, part in found.items()}
    bf16, fp8 = rows.get("model_bf16", []), rows.get("model_fp8", [])
    kernels = rows.get("kernels", [])
    batches = sorted({row["batch"] for row in bf16 if row.get("what") == "decode"}) or [1, 128]
    lines = []
    for batch in batches:
        wanted = 0.85 if batch == 1 else 0.70
        decode = {"what": "decode", "batch": batch}
        lines += [
            _line(f"bf16 decode, batch {batch}, of bandwidth", wanted, _value(bf16, "of_bandwidth", decode)),
            _line(
                f"fp8 against bf16, decode, batch {batch}",
                1.6,
                _ratio(_value(bf16, "ms", decode), _value(fp8, "ms", decode)),
            ),
            _line(
                f"GPU waits for Python, bf16 decode, batch {batch} (at most)",
                0.05,
                _value(bf16, "gpu_waits", decode),
            ),
        ]
    serving = rows.get("serving_fp8", [])
    lines += [
        _line("bf16 prefill, of matrix rate", 0.60, _value(bf16, "of_matrix_rate", {"what": "prefill"})),
        _line("serving fp8, of TensorRT-LLM's published figure", 0.7, _value(serving, "of_published", {})),
        _line("prefill attention, times torch's fastest, least", 0.9, _least(kernels, "times_fastest_sdpa")),
        _line("decode attention, times torch, least", 1.0, _least(kernels, "times_sdpa")),
    ]
    machine = next((part["machine"] for part in found.values()), {})
    content = {"title": "Summary", "machine": machine, "finished": True, "rows": lines}
    (folder / "gpu-summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return lines


def _line(what: str, wanted: float, measured: float | None) -> dict[str, Any]:
    shown = "not measured" if measured is None else float(f"{measured:.3g}")
    return {"what": what, "wanted": wanted, "measured": shown}


def _value(rows: Rows, key: str, wanted: dict[str, Any]) -> float | None:
    for row in rows:
        if key in row and row.items() >= wanted.items():
            return float(row[key])
    return None


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _least(rows: Rows, key: str) -> float | None:
    return min((float(row[key]) for row in rows if key in row), default=None)
