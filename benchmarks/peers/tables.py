"""What runs beside peers say, in Markdown: medians, the best peer of each load, the machine's roofline.

The roofline is that of the best rates known (roofline.py), and beside it, where recorded, that of the bytes
which are read where weights lie in fewer bits than the checkpoint has, and that of torch's bfloat16 product.
What each form of weights costs in quality (benchmarks/quantization.py) stands below them, beside the speeds
of the forms that ran. `python -m benchmarks.tables` puts them on a page.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.peers.loads import LOADS
from benchmarks.peers.roofline import Machine, Precision, bound_tokens_per_s, prefill_bound_tokens_per_s

PREFILL = "prefill"
PREFIX = "millrace-"
# Precision of ours: engine settings, and what the roofline must know of them.
OURS: dict[str, tuple[dict[str, object], Precision]] = {
    "bf16": ({"dtype": "bfloat16"}, Precision()),
    "int8": (
        {"dtype": "bfloat16", "quantize": "int8", "cache.kv_dtype": "int8"},
        Precision(weight_bytes=1.0, kv_bytes=1.0),
    ),
    "w8a8": (
        {"dtype": "bfloat16", "quantize": "w8a8", "cache.kv_dtype": "int8"},
        Precision(weight_bytes=1.0, kv_bytes=1.0, int8_rows=True),
    ),
    "int4": (
        {"dtype": "bfloat16", "quantize": "int4", "cache.kv_dtype": "int8"},
        Precision(weight_bytes=0.5, kv_bytes=1.0),
    ),
    # The GGUF file of a checkpoint that has one, its Q4_1 as it lies there: 4 bits, and 32 for each 32.
    "file": ({"dtype": "bfloat16"}, Precision(weight_bytes=0.625)),
}
# Of this one the path is the GGUF file.
OF_THE_FILE = "file"

# Precision of ours: its row in the results of benchmarks.quantization.
FORMS = {
    "bf16": "bfloat16",
    "int8": "int8 (W8A16), int8 KV, bfloat16",
    "w8a8": "int8 (W8A8), int8 KV, bfloat16",
    "int4": "int4, groups of 64, int8 KV, bfloat16",
}
QUALITY = Path("benchmarks/results/quantization.json")
# Runs of forms that were not run beside peers, in the form of the results beside them.
OTHER_FORMS = "forms_*.json"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one server. Times in milliseconds."""

    server: str
    load: str
    output_tokens_per_s: float
    ttft_mean_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    itl_p99_ms: float
    num_failed: int


@dataclass(kw_only=True)
class Measured:
    """Everything that a table needs."""

    runs: list[Run]
    start_s: dict[str, float]
    rss_bytes: dict[str, int]
    # Servers that could not be had, or ended before the last run, and why.
    left_out: dict[str, str] = field(default_factory=dict)
    # What holds the servers to a level of instructions; empty where nothing does.
    held: str = ""

    def of(self, server: str, load: str) -> list[Run]:
        """Runs of one load on one server."""
        return [run for run in self.runs if (run.server, run.load) == (server, load)]


def table(measured: Measured, rates: Machine, checkpoint: str) -> list[str]:
    """Rows in Markdown, and a line for each server."""
    servers = list(dict.fromkeys(run.server for run in measured.runs))
    peers = [server for server in servers if not _is_ours(server)]
    lines = [
        "| load | server | output tokens/s | × best peer | of roofline | as read | of torch's "
        "| TTFT mean, p99 ms | ITL p99 ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    loads = [load for load in LOADS if load != PREFILL and any(run.load == load for run in measured.runs)]
    for load in loads:
        best = max((_median(measured.of(peer, load), "output_tokens_per_s") for peer in peers), default=0.0)
        for server in servers:
            runs = measured.of(server, load)
            if not runs:
                continue
            rate = _median(runs, "output_tokens_per_s")
            roofline = as_read = by_torch = ""
            if _is_ours(server):
                precision = precision_of(server)
                roofline = _share(rate, bound_tokens_per_s(rates, checkpoint, LOADS[load], precision))
                if read := _as_read(rates, precision):
                    as_read = _share(rate, bound_tokens_per_s(rates, checkpoint, LOADS[load], read))
                if slower := _by_torch(rates, precision):
                    by_torch = _share(rate, bound_tokens_per_s(slower, checkpoint, LOADS[load], precision))
            ratio = f"{rate / best:.2f}" if best else ""
            failed = sum(run.num_failed for run in runs)
            failures = f" ({failed} requests failed)" if failed else ""
            lines.append(
                f"| {load} | {server} | {rate:.1f}{failures} | {ratio} | {roofline} | {as_read} | {by_torch} "
                f"| {_median(runs, 'ttft_mean_ms'):.0f}, {_median(runs, 'ttft_p99_ms'):.0f} | "
                f"{_median(runs, 'itl_p99_ms'):.0f} |"
            )
    return [
        *lines,
        "",
        *prefill_lines(measured, servers, rates, checkpoint),
        *_memory_lines(measured, servers),
        *(f"- {server} left out: {reason}" for server, reason in measured.left_out.items()),
        *([f"- {measured.held}"] if measured.held else []),
    ]


def prefill_lines(measured: Measured, servers: list[str], rates: Machine, checkpoint: str) -> list[str]:
    """Prompt tokens per second of each server on the load of long prompts, where that was run."""
    lines = []
    for server in servers:
        runs = measured.of(server, PREFILL)
        if runs:
            num_tokens = LOADS[PREFILL].input_tokens
            rate = 1000 * num_tokens / _median(runs, "ttft_mean_ms")
            line = f"- {server}: {rate:.0f} prompt tokens/s on prompts of {num_tokens}"
            if _is_ours(server):
                precision = precision_of(server)
                bound = prefill_bound_tokens_per_s(rates, checkpoint, precision, num_tokens)
                line += f", {rate / bound:.0%} of the rate of multiplication"
                if slower := _by_torch(rates, precision):
                    by_torch = prefill_bound_tokens_per_s(slower, checkpoint, precision, num_tokens)
                    line += f" ({rate / by_torch:.0%} of torch's)"
            lines.append(line)
    return lines


def _share(rate: float, bound: float) -> str:
    return f"{rate / bound:.0%} of {bound:.0f}"


def _by_torch(rates: Machine, precision: Precision) -> Machine | None:
    """The machine by torch's product, where a precision multiplies as that does and its rate is recorded."""
    return None if precision.int8_rows else rates.by_torch()


def _as_read(rates: Machine, precision: Precision) -> Precision | None:
    """With the bytes that our products read of a weight, where these are fewer than the checkpoint has."""
    read = rates.read_bytes_per_bfloat16
    return replace(precision, weight_bytes=read) if read < precision.weight_bytes else None


def _memory_lines(measured: Measured, servers: list[str]) -> list[str]:
    return [
        f"- {server}: ready after {measured.start_s[server]:.1f} s, "
        f"{measured.rss_bytes[server] / 2**30:.2f} GiB resident after the runs"
        for server in servers
        if server in measured.start_s and server in measured.rss_bytes
    ]


def _is_ours(server: str) -> bool:
    return server.startswith(PREFIX)


def precision_of(server: str) -> Precision:
    """That of one of ours; bfloat16 for peers."""
    return OURS[server.removeprefix(PREFIX)][1] if _is_ours(server) else Precision()


def _median(runs: list[Run], field: str) -> float:
    return median([float(getattr(run, field)) for run in runs] or [0.0])


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A result file."""

    machine: dict[str, object]
    checkpoint: str
    runs: list[Run]
    start_s: dict[str, float]
    rss_bytes: dict[str, int]
    left_out: dict[str, str] = {}
    held: str = ""

    def table(self) -> list[str]:
        """Its title and rows."""
        # Older records lack some of the rates.
        known = {name: value for name, value in self.machine.items() if name in Machine.__dataclass_fields__}
        rates = Machine(**{name: float(str(value)) for name, value in known.items()})
        measured = Measured(
            runs=self.runs,
            start_s=self.start_s,
            rss_bytes=self.rss_bytes,
            left_out=self.left_out,
            held=self.held,
        )
        title = (
            f"**{self.checkpoint}** on {self.machine.get('cpu', 'a CPU')}, {self.machine.get('cores', '?')} "
            f"cores: memory {rates.read_bytes_per_s / 1e9:.0f} GB/s, bfloat16 "
            f"{rates.bfloat16_flops_per_s / 1e12:.2f} TFLOP/s, int8 {rates.int8_ops_per_s / 1e12:.2f} Top/s"
        )
        if rates.torch_bfloat16_flops_per_s:
            title += f", torch's bfloat16 product {rates.torch_bfloat16_flops_per_s / 1e12:.2f} TFLOP/s"
        note = str(self.machine.get("note", ""))
        return [f"{title}. {note}".strip(), "", *table(measured, rates, self.checkpoint), ""]


def quality_table(results: Path, recorded: list[Recorded]) -> list[str]:
    """Perplexity of every form of the bundled model, beside the speeds of those that ran: beside peers, or in
    the files beside `results`.
    """
    measured = msgspec.json.decode(results.read_bytes())
    precisions = {form: precision for precision, form in FORMS.items()}
    speeds: dict[str, Measured] = {}
    for each in [*recorded, *map(read, sorted(results.parent.glob(OTHER_FORMS)))]:
        known = speeds.setdefault(each.checkpoint, Measured(runs=[], start_s={}, rss_bytes={}))
        ran = {run.server for run in known.runs if run.load == "1"}
        # What ran beside peers is not mixed with what ran another time.
        known.runs += [run for run in each.runs if run.load.isdecimal() and run.server not in ran]
    head = ["form", "perplexity", "likeliest token is float32's", "weights"]
    head += [f"{name}, tokens/s at {', '.join(_numbered(each))}" for name, each in speeds.items()]
    lines = [
        f"**Forms of weights.** {measured['title']}; speeds are those of the tables above, and of "
        "runs of their own for forms that are not in them. AWQ, GPTQ, compressed-tensors and GGUF are these "
        "weights rounded to nearest and stored in those formats: what a method of that name makes of "
        "calibration is not measured here.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in measured["rows"]:
        cells = [
            row["form"],
            f"{row['perplexity']:.4f}",
            f"{row['same %']:.2f} %",
            f"{row['weights MiB']:.1f} MiB",
        ]
        server = f"{PREFIX}{precisions.get(row['form'], '')}"
        cells += [", ".join(_rates(each, server)) for each in speeds.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def read(path: Path) -> Recorded:
    """A result file's contents."""
    return msgspec.json.decode(path.read_bytes(), type=Recorded)


def _numbered(measured: Measured) -> list[str]:
    return [load for load in LOADS if any(run.load == load for run in measured.runs)]


def _rates(measured: Measured, server: str) -> list[str]:
    runs = [measured.of(server, load) for load in _numbered(measured)]
    return [f"{_median(each, 'output_tokens_per_s'):.0f}" for each in runs if each]
