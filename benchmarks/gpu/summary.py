"""What was wanted beside what was measured, from the parts' files.

    python -m benchmarks.gpu.summary FOLDER

does it for files that came from several runs.
"""

from __future__ import annotations

import json
import sys
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
        decode = {"what": "decode", "batch": batch, "draw": "greedy"}
        sampled = decode | {"draw": "sampled"}
        lines += [
            _line(f"bf16 decode, batch {batch}, of bandwidth", wanted, _value(bf16, "of_bandwidth", decode)),
            _line(
                f"fp8 against bf16, decode, batch {batch}",
                1.6,
                _ratio(_value(bf16, "ms", decode), _value(fp8, "ms", decode)),
            ),
            _line(
                f"bf16 decode, batch {batch}, sampled against greedy (at most)",
                1.03,
                _ratio(_value(bf16, "ms", sampled), _value(bf16, "ms", decode)),
            ),
            _line(
                f"GPU waits for Python, bf16 decode, batch {batch} (at most)",
                0.05,
                _value(bf16, "gpu_waits", decode),
            ),
        ]
    serving, peers = rows.get("serving_fp8", []), rows.get("peers", [])
    theirs = {"what": "decode, dynamic cache, eager"}
    lines += [
        _line(
            f"bf16 decode, batch {batch}, times transformers",
            1.0,
            _ratio(
                _value(peers, "ms", theirs | {"batch": batch}),
                _value(bf16, "ms", {"batch": batch, "draw": "greedy"}),
            ),
        )
        for batch in batches
    ]
    prefill = {"what": "prefill"}
    lines += [
        _line("bf16 prefill, of matrix rate", 0.60, _value(bf16, "of_matrix_rate", {"what": "prefill"})),
        _line(
            "bf16 prefill, times transformers",
            1.0,
            _ratio(_value(peers, "ms", prefill), _value(bf16, "ms", prefill)),
        ),
        _line(
            "bf16 serving (1,000 out), times transformers' continuous batching (128 out)",
            1.0,
            _ratio(
                _value(rows.get("serving_bf16", []), "output_tokens_per_s", {}),
                _value(peers, "output_tokens_per_s", {}),
            ),
        ),
        _line("serving fp8, of TensorRT-LLM's published figure", 0.7, _value(serving, "of_published", {})),
        _line("prefill attention, times torch's fastest, least", 0.9, _least(kernels, "times_fastest_sdpa")),
        _line("decode attention, times torch, least", 1.0, _least(kernels, "times_sdpa")),
    ]
    machine = next((part["machine"] for part in found.values()), {})
    content = {"title": "Summary", "machine": machine, "finished": True, "rows": lines}
    (folder / "gpu-summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """Prints them."""
    for line in lines:
        print(f"  {line['what']}: {line['measured']} (wanted {line['wanted']})")


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


if __name__ == "__main__":
    show(summarize(Path(sys.argv[1])))
