"""What was wanted beside what was measured, over the rows of all leases in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Rows, read_rows

BATCHES = (1, 16, 128)
# Phases that say whether results are right.
CHECKS = ("smoke", "tests", "captured", "sanitizer")


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One figure. `measured` returns None where rows do not say it."""

    what: str
    wanted: float
    measured: Callable[[Rows], float | None]
    at_most: bool = False
    # Of the worst of many figures: the phases without all of which it is not known to be met.
    over: tuple[str, ...] = ()

    def line(self, rows: Rows, *, rehearsed: bool) -> dict[str, Any]:
        """Of the verdict."""
        found = self.measured(rows)
        if found is None:
            verdict = "not run"
        elif rehearsed:
            verdict = "rehearsal"
        elif found > self.wanted if self.at_most else found < self.wanted:
            verdict = "missed"
        else:
            verdict = "met" if all(_is_whole(rows, phase) for phase in self.over) else "not all run"
        wanted = f"{'at most' if self.at_most else 'at least'} {self.wanted:g}"
        return {"aim": self.what, "wanted": wanted, "measured": found, "verdict": verdict}


def _is_whole(rows: Rows, phase: str) -> bool:
    """Whether a phase came to its end and left nothing out."""
    there = [row for row in rows if row.get("phase") == phase]
    ended = any(row.get("outcome") == "done" for row in there)
    return ended and not any("not_measured" in row or "failed" in row for row in there)


def _values(rows: Rows, key: str, wanted: Mapping[str, Any]) -> list[float]:
    return [float(row[key]) for row in rows if key in row and row.items() >= wanted.items()]


def _least(key: str, **wanted: Any) -> Callable[[Rows], float | None]:
    return lambda rows: min(_values(rows, key, wanted), default=None)


def _most(key: str, **wanted: Any) -> Callable[[Rows], float | None]:
    return lambda rows: max(_values(rows, key, wanted), default=None)


def _ratio(key: str, above: Mapping[str, Any], below: Mapping[str, Any]) -> Callable[[Rows], float | None]:
    """The first value of `key` where rows have what is in `above`, over that of `below`."""

    def measured(rows: Rows) -> float | None:
        ones, others = _values(rows, key, above), _values(rows, key, below)
        return ones[0] / others[0] if ones and others and others[0] else None

    return measured


def _decode(kind: str, batch: int, sampling: str = "greedy") -> dict[str, Any]:
    return {"phase": f"model_{kind}", "what": "decode", "batch": batch, "sampling": sampling}


def _sampled_costs(rows: Rows) -> float | None:
    """The largest ratio of a sampled step to a greedy one, over the batches."""
    ratios = [
        _ratio("ms", _decode("bf16", batch, "sampled"), _decode("bf16", batch))(rows) for batch in BATCHES
    ]
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _num_wrong(rows: Rows) -> float | None:
    """Results that are not right; None before anything was checked."""
    checked = [row for row in rows if row.get("checked") or "wrong" in row]
    return float(sum("wrong" in row for row in checked)) if checked else None


_PEER = {"phase": "peers", "what": "decode, dynamic cache, eager"}
AIMS = (
    Aim(what="wrong results", wanted=0, measured=_num_wrong, at_most=True, over=CHECKS),
    Aim(
        what="8B bf16 decode, batch 1, of copy bandwidth",
        wanted=0.85,
        measured=_least("of_bandwidth", **_decode("bf16", 1)),
    ),
    Aim(
        what="8B bf16 decode, batch 128, of copy bandwidth",
        wanted=0.70,
        measured=_least("of_bandwidth", **_decode("bf16", 128)),
    ),
    Aim(
        what="sampled step, times greedy, worst",
        wanted=1.03,
        measured=_sampled_costs,
        at_most=True,
        over=("model_bf16",),
    ),
    Aim(
        what="8B bf16 prefill of 8k, of matrix rate",
        wanted=0.60,
        measured=_least("of_matrix_rate", phase="model_bf16", what="prefill"),
    ),
    Aim(
        what="Python's share of a bf16 decode step, worst",
        wanted=0.05,
        measured=_most("gpu_waits", phase="model_bf16", what="decode"),
        at_most=True,
        over=("model_bf16",),
    ),
    *(
        Aim(
            what=f"fp8 decode, batch {batch}, times bf16",
            wanted=1.6,
            measured=_ratio("ms", _decode("bf16", batch), _decode("fp8", batch)),
        )
        for batch in (1, 128)
    ),
    Aim(
        what="int4 decode, batch 1, times bf16",
        wanted=2.2,
        measured=_ratio("ms", _decode("bf16", 1), _decode("int4", 1)),
    ),
    Aim(
        what="served 8B fp8 through sockets, of TensorRT-LLM's 17,744 tokens/s",
        wanted=0.7,
        measured=_least("of_published", phase="served_fp8", sampling="greedy"),
    ),
    Aim(
        what="prefill attention, times the fastest peer, least",
        wanted=0.9,
        measured=_least("times_fastest_peer", what="prefill"),
        over=("kernels",),
    ),
    Aim(
        what="decode attention, times the fastest peer, least",
        wanted=1.0,
        measured=_least("times_fastest_peer", what="decode"),
        over=("kernels",),
    ),
    Aim(
        what="bf16 decode, batch 1, times transformers",
        wanted=1.0,
        measured=_ratio("ms", _PEER | {"batch": 1}, _decode("bf16", 1)),
    ),
)


def judge(folder: Path) -> list[dict[str, Any]]:
    """Writes FOLDER/gpu-verdict.json and returns its lines; rows of a rehearsal meet and miss nothing."""
    rows = read_rows(folder)
    rehearsed = any(row.get("rehearsed") for row in rows)
    lines = [aim.line(rows, rehearsed=rehearsed) for aim in AIMS]
    machine = next((row["machine"] for row in rows if "machine" in row), {})
    content = {"machine": machine, "rehearsed": rehearsed, "aims": lines}
    (folder / "gpu-verdict.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """The table: aim, what was wanted, what was measured, met or missed."""
    print(f"\n{'aim':68}{'wanted':>15}{'measured':>11}  verdict")
    for line in lines:
        found = "-" if line["measured"] is None else f"{line['measured']:.3g}"
        print(f"{line['aim']:68}{line['wanted']:>15}{found:>11}  {line['verdict']}")
