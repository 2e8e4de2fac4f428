"""The road of one streaming chat: which of the project's files run for it, and as what it is carried.

`python -m tests.architecture.road` starts a stack, sends a chat until prompt and answer are known, sends it
again and prints, for each process, the files whose functions ran meanwhile (not those that were only
imported), and the types of records and messages that carried the prompt down and the answer up. Nothing is
counted by hand: `road_hook/sitecustomize.py` notes it in the processes. What a process does beside, such as
reporting its load, counts where it falls into the same second; files that run while nobody asks as well are
marked, and counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from tests.architecture.sources import ROOT
from tests.e2e.stack import Stack, eventually, running_stack

HOOK = Path(__file__).resolve().parent / "road_hook"
# Rare words: nothing but the prompt has them.
MARK = "quillwort marzipan"
MESSAGE = f"Write a sentence about {MARK}, please."
MAX_TOKENS = 16
# Processes in which a request's road lies, by a module in their command; others only look on.
ON_THE_ROAD = ("gateway", "tokenizer_svc", "engine")
# Shorter pieces of an answer occur by chance.
LEAST_PIECE = 4
# So long is noted what runs while nobody asks.
IDLE_S = 3.0


@dataclass(frozen=True)
class Part:
    """What one process noted. `carriers`: way ("prompt", "answer") → type → file where it was first seen."""

    command: str
    files: tuple[str, ...]
    carriers: Mapping[str, Mapping[str, str]]
    # Those that ran as well while nobody asked.
    idle: frozenset[str]

    @property
    def is_on_the_road(self) -> bool:
        return any(f"-m {name}" in self.command for name in ON_THE_ROAD)


def chat(stack: Stack) -> list[str]:
    """The pieces of one streamed answer."""
    stream = stack.openai().chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": MESSAGE}],
        max_completion_tokens=MAX_TOKENS,
        temperature=0.0,
        stream=True,
    )
    return [each.choices[0].delta.content or "" for each in stream if each.choices]


def sought(stack: Stack, pieces: list[str]) -> dict[str, dict[str, Any]]:
    """What tells prompt and answer from all else: texts, and token ids of which so many must be there."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "millrace-nano" / "tokenizer.json"))
    prompt = tokenizer.encode(" " + MARK, add_special_tokens=False).ids
    text = "".join(pieces)
    answer = tokenizer.encode(text, add_special_tokens=False).ids
    words = sorted(
        {each.strip() for each in pieces if len(each.strip()) >= LEAST_PIECE and each not in MESSAGE}
    )
    rare = [each for each in answer if each not in tokenizer.encode(MESSAGE).ids and each > 1024]
    assert words, f"no piece of the answer tells it apart: {pieces}"
    assert rare, f"no token of the answer tells it apart: {answer}"
    return {
        "prompt": {"texts": [MARK], "ids": prompt, "num_ids": len(set(prompt))},
        "answer": {"texts": words, "ids": rare, "num_ids": 1},
    }


def travel(directory: Path) -> list[Part]:
    """Starts a stack, sends the chat and returns what its processes noted."""
    road = directory / "road"
    road.mkdir()
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"ROAD": str(road), "ROAD_ROOT": str(ROOT), "PYTHONPATH": os.pathsep.join(paths)}
    with running_stack(
        directory / "stack", "--engines", "1", "--gateways", "1", environment=environment
    ) as stack:
        pieces = chat(stack)
        seek = sought(stack, pieces)
        pids = [each.pid for each in stack.all_processes() if is_watched(each.pid)]
        idle = noted(road, pids, seek, lambda: time.sleep(IDLE_S))
        asked = noted(road, pids, seek, lambda: chat(stack))
    return [
        Part(" ".join(each["command"]), tuple(each["files"]), each["carriers"], frozenset(idle[pid]["files"]))
        for pid, each in asked.items()
    ]


def noted(
    road: Path, pids: list[int], seek: Mapping[str, Any], act: Callable[[], object]
) -> dict[int, dict[str, Any]]:
    """What each process notes while something is done."""
    (road / "written").write_text(json.dumps(seek))
    (road / "written").rename(road / "armed")
    assert eventually(lambda: not unarmed(road, pids)), unarmed(road, pids)
    act()
    (road / "armed").unlink()
    files = {pid: road / f"{pid}.json" for pid in pids}
    assert eventually(lambda: all(each.exists() for each in files.values())), "not all have written"
    found = {pid: json.loads(each.read_text()) for pid, each in files.items()}
    for pid, each in files.items():
        each.unlink()
        (road / f"{pid}.armed").unlink()
    return found


def unarmed(road: Path, pids: list[int]) -> list[str]:
    """Commands of those that have not begun to note."""
    return [" ".join(psutil.Process(pid).cmdline()) for pid in pids if not (road / f"{pid}.armed").exists()]


def is_watched(pid: int) -> bool:
    """Whether a process is Python's and has the hook."""
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    return b"ROAD=" in environment and Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("python")


def report(parts: list[Part], *, lists_files: bool) -> str:
    """What is printed."""
    lines, road = [], [part for part in parts if part.is_on_the_road]
    for part in sorted(parts, key=lambda part: (not part.is_on_the_road, part.command)):
        note = "" if part.is_on_the_road else " (not on the road)"
        lines.append(f"{len(part.files):4} files in {part.command[:90]}{note}")
        if lists_files:
            lines += [f"       {name}{' (idle, too)' * (name in part.idle)}" for name in part.files]
    for way in ("prompt", "answer"):
        kinds = {kind: name for part in road for kind, name in part.carriers[way].items()}
        lines.append(f"{len(kinds):4} types carry the {way}:")
        lines += [f"       {kind}  ({name})" for kind, name in kinds.items()]
    union = {name for part in road for name in part.files}
    beside = {name for part in road for name in part.files if name in part.idle}
    lines.append(
        f"{len(union):4} files of ours on the road, {len(beside)} of which run while nobody asks, too"
    )
    return "\n".join(lines)


def main() -> None:
    """Prints the road of one streaming chat."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="name the files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(report(travel(Path(directory)), lists_files=arguments.files))


if __name__ == "__main__":
    main()
