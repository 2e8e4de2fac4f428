"""Encoding throughput of the service's encoder beside raw `tokenizers`, in one run.

python benchmarks/tokenizer_encoding.py [--checkpoint DIR] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from contract.chat import Conversation, Message, Role
from tokenizer_svc.config import BUNDLED_CHECKPOINT, LimitsConfig
from tokenizer_svc.text.checkpoint import load_checkpoint
from tokenizer_svc.text.control import ControlTokens
from tokenizer_svc.text.encoding import TextEncoder
from tokenizer_svc.text.template import ChatTemplates

_ROOT = Path(__file__).resolve().parent.parent
_REPEATS = 3
_NUM_CHARACTERS = 100_000
_NUM_TURNS = 60


def source_text() -> str:
    """The repository's own prose and code."""
    files = sorted([*_ROOT.glob("*.md"), *_ROOT.glob("*/*.md"), *(_ROOT / "tokenizer_svc").glob("**/*.py")])
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    # Spelled control tokens are another path; they are rare outside of this repository.
    return text.replace("<", "(")[:_NUM_CHARACTERS]


def throughput(work: Callable[[], object], num_bytes: int) -> float:
    """MB/s of the best of several repetitions."""
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best / 1e6


def main() -> int:
    """Prints MB/s of each way of encoding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=BUNDLED_CHECKPOINT)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    checkpoint = load_checkpoint(arguments.checkpoint)
    control = ControlTokens(checkpoint.description["added_tokens"], checkpoint.templates.values())
    templates = ChatTemplates(checkpoint.templates, checkpoint.special_tokens, control, LimitsConfig())
    encoder = TextEncoder(checkpoint, control, turn_cache_tokens=1 << 24)
    raw = Tokenizer.from_str(checkpoint.tokenizer_json)
    text = source_text()
    size = len(text.encode())
    lines = [text[start : start + 2000] for start in range(0, len(text), 2000)]
    turns = [
        Message(role=Role.USER if index % 2 == 0 else Role.ASSISTANT, content=lines[index % len(lines)])
        for index in range(_NUM_TURNS)
    ]
    rendered = templates.render(Conversation(messages=tuple(turns)))
    history = len(rendered.encode())
    expected = raw.encode(rendered, add_special_tokens=False).ids
    assert encoder.encode_rendered(rendered, tenant="check").token_ids == expected
    fresh = iter(range(10_000))
    figures = {
        "raw, one text": throughput(lambda: raw.encode(text, add_special_tokens=False), size),
        "service, one text": throughput(lambda: encoder.encode_text(text, add_special_tokens=False), size),
        "raw, batch": throughput(lambda: raw.encode_batch(lines, add_special_tokens=False), size),
        "service, batch": throughput(lambda: encoder.encode_batch(lines, add_special_tokens=False), size),
        f"raw, history of {_NUM_TURNS} turns": throughput(
            lambda: raw.encode(rendered, add_special_tokens=False), history
        ),
        "service, the history for the first time": throughput(
            lambda: encoder.encode_rendered(rendered, tenant=str(next(fresh))), history
        ),
        "service, the history again": throughput(
            lambda: encoder.encode_rendered(rendered, tenant="again"), history
        ),
    }
    for name, value in figures.items():
        print(f"{name:44}{value:10.2f} MB/s")
    if arguments.json:
        report = {"bytes": size, "history_bytes": history, "mb_per_s": figures}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
