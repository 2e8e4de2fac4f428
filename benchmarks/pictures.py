"""The README's pictures: `python -m benchmarks.pictures peers`, `… waterfall [--store FILE] [--request ID]`.

`peers` draws what is recorded in benchmarks/results (it needs matplotlib: `pip install --group pictures`);
`waterfall` draws one trace of a stack that ran here as `millrace trace` shows it in a terminal.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.peers.loads import LOADS
from benchmarks.peers.tables import PREFILL, PREFIX, Recorded, read
from observability.analysis.store import SpanReader
from observability.analysis.waterfall import render
from observability.emit.config import ObservabilityConfig

_RESULTS = Path("benchmarks/results")
_IMAGES = Path("docs/images")
# Records whose loads have prompts of their own and beside which nothing ran, by checkpoint.
_RECORDS = {
    "qwen3-0.6b": ("peers_qwen3_0.6b.json", "peers_qwen3_0.6b_prompts.json"),
    "llama-40m": ("peers_llama_40m.json",),
}
_COLOURS = {
    "millrace-bf16": "#1f6f8b",
    "millrace-w8a8": "#63b7c9",
    "vllm": "#e08e45",
    "llama.cpp-q8_0": "#9a9a9a",
    "openvino": "#8d6cab",
}
_WATERFALL_COLUMNS = 150
# Fonts of the reader's own: rich's form fetches one from the network.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px;
line-height: {line_height}px; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
<rect fill="#1b1d23" width="100%" height="100%" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def rates(records: list[Recorded]) -> dict[str, dict[str, float]]:
    """Median output tokens per second, by load and server, in the order of the loads."""
    runs = [run for record in records for run in record.runs]
    found: dict[str, dict[str, float]] = {}
    for load in LOADS:
        servers = dict.fromkeys(run.server for run in runs if run.load == load and load != PREFILL)
        for server in servers:
            values = [run.output_tokens_per_s for run in runs if (run.load, run.server) == (load, server)]
            found.setdefault(load, {})[server] = median(values)
    return found


def draw_peers(target: Path) -> None:
    """A group of bars for every load that was recorded, in shares of our bfloat16."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "millrace"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_RECORDS), figsize=(11, 3.6), layout="constrained")
    for axis, (checkpoint, files) in zip(axes, _RECORDS.items(), strict=True):
        by_load = rates([read(_RESULTS / name) for name in files])
        position, ticks = 0.0, []
        for load, servers in by_load.items():
            ticks.append((position + (len(servers) - 1) / 2, load))
            for server, rate in servers.items():
                label = server if server not in axis.get_legend_handles_labels()[1] else None
                # Loads differ by a hundred times: each has its own scale, and figures above the bars.
                share = rate / servers[f"{PREFIX}bf16"]
                axis.bar(position, share, color=_COLOURS[server], label=label)
                axis.text(position, share, f"{rate:.0f}", ha="center", va="bottom", fontsize=8)
                position += 1
            position += 1
        axis.set_xticks([place for place, _ in ticks], [name for _, name in ticks])
        axis.set_title(f"{checkpoint}: output tokens/s", fontsize=10)
        axis.set_yticks([])
        axis.set_ylim(top=2.2)
        axis.set_xlabel("requests at a time" + (", or shared prefix" if "prefix" in by_load else ""))
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)
    figure.savefig(target, metadata={"Date": None})


def draw_waterfall(target: Path, store: Path, request: str) -> None:
    """One trace as the terminal shows it."""
    reader = SpanReader(store)
    try:
        spans = reader.find(request)
    finally:
        reader.close()
    with Path("/dev/null").open("w") as nowhere:
        console = Console(width=_WATERFALL_COLUMNS, record=True, file=nowhere, highlight=False)
        console.print(render(spans, _WATERFALL_COLUMNS))
    target.write_text(console.export_svg(title="", code_format=_SVG, unique_id="trace"), encoding="utf-8")


def main() -> None:
    """Draws one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("picture", choices=["peers", "waterfall"])
    parser.add_argument("--store", type=Path, default=Path(ObservabilityConfig().store))
    parser.add_argument("--request", default="last")
    arguments = parser.parse_args()
    _IMAGES.mkdir(exist_ok=True)
    if arguments.picture == "peers":
        draw_peers(_IMAGES / "peers.svg")
    else:
        draw_waterfall(_IMAGES / "waterfall.svg", arguments.store, arguments.request)


if __name__ == "__main__":
    main()
