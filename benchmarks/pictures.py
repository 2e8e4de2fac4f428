"""Draws what is recorded beside other servers, for the README: `python -m benchmarks.pictures`.

It needs matplotlib: `pip install --group pictures`.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks.peers.loads import LOADS
from benchmarks.peers.tables import PREFILL, PREFIX, Recorded, read

_RESULTS = Path("benchmarks/results")
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


if __name__ == "__main__":
    draw_peers(Path("docs/images/peers.svg"))
