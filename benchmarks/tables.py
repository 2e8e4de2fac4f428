"""docs/benchmarks-tables.md, made of the records: `python -m benchmarks.tables` writes it anew.

Every record in benchmarks/results has its table there, with the program that printed it and the machine; a
test holds the page to the records. What ran beside other servers has tables of its own (peers/tables.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.neighbour import __main__ as neighbour
from benchmarks.peers import tables as peers

RESULTS = Path("benchmarks/results")
PAGE = Path("docs/benchmarks-tables.md")
# Every way to draft.
_DRAFTERS = (
    "drafters --draft-model models/millrace-nano-draft --head models/millrace-nano-eagle3 "
    "--medusa models/millrace-nano-medusa"
)
# How the names of records begin, and what prints them; the longest beginning counts.
COMMANDS = {
    "adapters_beside_vllm": "peers.adapters",
    "batches_beside": "batches beside --rate 5 --seconds 100",
    "batches_killed": "batches killed",
    "batches_million": "batches million",
    "chaos_bundled": "chaos --bundled",
    "chaos_ranks": "chaos --ranks 2",
    "chaos_simulated": "chaos",
    "chaos_stop_20s": "chaos --stop --stop-seconds 20",
    "chaos_stop_20s_continued": "chaos --stop --bundled --clients-continue --stop-seconds 20",
    "chaos_stop_75s": "chaos --stop",
    "door": "door --checkpoint build/peers/llama-40m",
    "faces": "gateways.faces",
    "hand_over": "hand_over --requests 24 --kills 1",
    "door_virtual": "door --virtual",
    "door_virtual_slow": "door --virtual --device slow",
    "engine_cpu_roofline": "engine.cpu_step",
    "embeddings": "engine.embeddings all-minilm-l6-v2 --threads 2",
    "engine_fairness": "engine.fairness",
    "engine_hybrids": "engine.hybrids --checkpoint qwen3-next-small --rounds 5",
    "engine_steps": "engine.steps",
    "first_paint": "first_paint --loads 15",
    "fleet": "fleet --model smollm2-135m --requests 40",
    "scaling": "scaling",
    "forgotten": "forgotten",
    "forgotten_stream": "forgotten --stream 100000",
    "full_disk": "full_disk",
    "gateway": "gateway_overhead",
    "gate": "gate",
    "limits_race": "limits_race",
    "maskbench": "maskbench",
    "memory": "peers.memory",
    "neighbour": "neighbour",
    "neighbour_thinking": 'neighbour --attack "64 votes of eight samples" "64 searches of eight steps"',
    "on_vllm": "peers.on_vllm",
    "drafters": f"{_DRAFTERS} --rounds 9",
    "drafters_always": f"{_DRAFTERS} --rounds 3 --streams 1 8 --always "
    "--tree '[[1,1,0],[2,0],[0,1,0],[0,0,1]]'",
    "drafters_smollm2": "drafters --model smollm2-135m --streams 1 --answers 12 --rounds 3",
    "drafters_same": "drafters_same --methods ngram suffix lookahead draft_model eagle3 'eagle3 tree' medusa",
    "drafters_smollm2_tasks": "drafters --model smollm2-135m --streams 1 --answers 5 --rounds 3 "
    "--draw sampled --tasks extraction chat code summary --only 'off again' ngram suffix",
    "drafters_tenants": f"{_DRAFTERS} --mixed --tasks extraction chat code summary --streams 8 32 64 "
    "--rounds 3 --answers 40 --draw sampled --only 'off again' suffix eagle3 medusa",
    "drafters_tasks": f"{_DRAFTERS} --rounds 3 --streams 1 --answers 24 --tasks extraction tools chat story",
    "packed_start": "packed_start --model QWEN3-0.6B --quantize int4 --rounds 3",
    "prefix_restart": "prefix_restart --rounds 3",
    "kv_forms_0_6b": "kv_forms --contexts 2048 8192 32768 --steps 8 --rounds 2",
    "kv_forms_smollm2": "kv_forms --checkpoint smollm2-135m --contexts 2048 8192 --steps 8 --rounds 2",
    "kv_layers_smollm2": "kv_layers",
    "kv_channels": "kv_channels",
    "kept_needles": "kept_needles --repeats 12",
    "kept_needles_smollm2": "kept_needles --model smollm2-135m --repeats 8 --tasks 16 --texts 6",
    "on_demand": "on_demand",
    "on_vllm_overload": "peers.on_vllm --overload 30 --batched-tokens 256",
    "quality_forms": "quality_forms",
    "ranks_stages": "ranks_speed --stages --rows 64 --prompts 512 1024",
    "test_time": "test_time",
    "test_time_smollm2": "test_time --model smollm2-135m --temperature 0.7 --questions 200 "
    "--ways 0.9 deepconf search",
    "test_time_judge": 'test_time --ways judge "stop (0.9)"',
    "test_time_ways": "test_time --questions 250 --ways search verifier critiques draft",
    "tracing_overhead": "tracing_overhead",
    "training_forms": "training_forms --steps 300",
    "weight_forms": "weight_forms --layers 2 --only Q --rows 1 8 32 256 --rounds 5",
}
NOTES = {
    "gateway": "These figures are older than the one load client: git keeps theirs, which takes less of the "
    "machine, at d74f817a, and LiteLLM as a peer.",
    "tracing_overhead": "These figures are older than the one load client: git keeps theirs at d74f817a.",
    "kept_needles_smollm2": "Beside other work: what was found and lost counts, rates and times do not.",
}
# In sections of their own; what compiles ahead of a GPU is no measurement.
_OTHERS = ("peers_", "turns_", "forms_", "quantization", "kernels_compiled_ahead")
_HEAD = """# Tables of the records

`python -m benchmarks.tables` makes this page of `benchmarks/results`. What the figures mean, and where they
fall short, is in [benchmarks](benchmarks.md). Shared machines vary: ratios within a table count.
"""
_BESIDE = """## Beside other servers on a CPU

`python -m benchmarks.peers` runs other servers in turn with ours: same checkpoint (of random weights, but
for SmolLM2), same client, greedy, 256 tokens in and 128 out ("prefix": 1,024 shared and 64 own in, 32
out, 16 at a time). Ours is the whole stack behind Envoy, theirs the bare server. The load's number is how
many requests run at a time. "Of roofline" is the share of what the machine's measured read bandwidth and
rates of multiplication allow at the checkpoint's two bytes a bfloat16 weight, "as read" that at the 12
bits in which they lie on processors that multiply float16 or have AVX2 alone, "torch's" that of torch's
bfloat16 product.
"""


def of_record(found: Mapping[str, str], name: str) -> str:
    """What a table of beginnings says of a record; empty when none fits."""
    return max(((key, text) for key, text in found.items() if name.startswith(key)), default=("", ""))[1]


def rows_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record's figures: its own rows, or a row for each thing that was measured, or for each figure."""
    for key in ("rows", "limits"):
        if isinstance(record.get(key), list):
            return list(record[key])
    for key in ("sides", "verdicts", "results"):
        if key in record:
            return [{"of": name, **each.get("figures", each)} for name, each in record[key].items()]
    return [{"figure": name, "value": value} for name, value in record.items() if _is_shown(value)]


def _is_shown(value: object) -> bool:
    return isinstance(value, str | int | float)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def markdown(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rows with the columns of all of them."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if _is_shown(value)))
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name)) for name in names)} |"


def section(path: Path) -> Iterator[str]:
    """One record: program, machine, table."""
    record = json.loads(path.read_text())
    machine = record.get("machine", "")
    cpu = machine if isinstance(machine, str) else machine.get("cpu", "")
    title, notes = record.get("title", ""), record.get("notes", "")
    yield f"### {path.stem}"
    yield ""
    said = [f"`python -m benchmarks.{of_record(COMMANDS, path.stem)}`", cpu, title, notes]
    yield ". ".join(text.strip().rstrip(".") for text in said if text) + "."
    if note := of_record(NOTES, path.stem):
        yield note
    yield ""
    if "attacks" in record:
        yield neighbour.TABLE
        yield from map(neighbour.row, record["attacks"])
    else:
        yield from markdown(rows_of(record))
    yield ""


def page() -> str:
    """The whole page."""
    recorded = [peers.read(path) for path in sorted(RESULTS.glob("peers_*.json"))]
    lines = [_HEAD, _BESIDE]
    for each in [*recorded, *map(peers.read, sorted(RESULTS.glob("turns_*.json")))]:
        lines += each.table()
    lines += [*peers.quality_table(RESULTS / peers.QUALITY.name, recorded), "## Gates", ""]
    for path in sorted(RESULTS.glob("*.json")):
        if not path.stem.startswith(_OTHERS):
            lines += section(path)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
