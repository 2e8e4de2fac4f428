"""Texts to train a scorer with that come without a download: pages and sources of this repository, in turns.

    python -m models.recipes.repository_texts OUT.jsonl [--count 96] [--chars 3200]

Each line is one piece of a file, from a place of chance; of equal arguments and files they are the same.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import msgspec

_ROOT = Path(__file__).parents[2]
# Kinds of files that take turns.
_KINDS = (("docs/*.md", "*/DESIGN.md", "*.md"), ("engine/**/*.py", "gateway/**/*.py", "kernels/**/*.py"))


def pieces(count: int, num_chars: int) -> Iterator[str]:
    """So many texts of so many characters."""
    drawn = random.Random(0)
    kinds = [
        [
            text
            for pattern in patterns
            for path in sorted(_ROOT.glob(pattern))
            if len(text := path.read_text(encoding="utf-8")) > num_chars
        ]
        for patterns in _KINDS
    ]
    for number in range(count):
        text = drawn.choice(kinds[number % len(kinds)])
        start = drawn.randrange(len(text) - num_chars)
        yield text[start : start + num_chars]


def main() -> None:
    """Writes them."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--chars", type=int, default=3200)
    given = parser.parse_args()
    lines = (msgspec.json.encode({"text": text}) for text in pieces(given.count, given.chars))
    given.out.write_bytes(b"\n".join(lines) + b"\n")


if __name__ == "__main__":
    main()
