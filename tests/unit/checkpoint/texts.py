"""Texts to compare tokenizers over: always the same ones, as other libraries' ids of them are kept."""

from __future__ import annotations

import random

CORPUS = (
    "The lighthouse keeper wrote down the weather every morning; on the third of March the sea was rough.",
    "Der Zug nach Zürich fährt um 14:35 Uhr von Gleis 7 ab, kostet 42,50 € und hält überall.",
    "東京は日本の首都です。今日は天気がいいですね。",
    "def area(width: int, height: int) -> int:\n    return width * height\n\n\nprint(area(3, 4))\n",
    "user system assistant tool: 1 2 3 4 5 6 7 8 9 10 100 1000 2026 it's we're they'll I'd THE SEA Sea",
    "Привет, мир! Как дела? Всё хорошо, спасибо. المرحبا بالعالم",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}',
    "====================  --------  ........  aaaaaaaabbbbbbbb        \t\t\t\n\n\n\n",
)
# Beside words of the corpus: runs, spaces of all kinds, what no vocabulary has, and what looks like a token.
_ODD = (
    " ", "  ", "   ", "        ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "▁", "▁▁",
    "a", "aa", "aaa", "aaaaa", "==", "=====", "...", "'s", "'LL", "123", "4567", "0",
    "🙂", "👩‍👩‍👧", "é", "e\u0301", "ﬁ", "Ａ", "½", "ß", "İ", "़", "한국어", "ꙮ",
    "\x00", "\x7f", "\ufffd", "𝒳",
    "<0x41>", "<s", "</", "<|im", "[INST]", "<x>", "{", "}", "\\", "\"",
)  # fmt: skip


def texts(count: int, extra: tuple[str, ...] = ()) -> list[str]:
    """So many texts; `extra` are mixed in as they are."""
    draw = random.Random(7)
    words = [word for line in CORPUS for word in line.split(" ") if word]
    found = ["", " ", "a", *CORPUS]
    while len(found) < count:
        parts = [draw.choice(draw.choice((words, _ODD, extra or _ODD))) for _ in range(draw.randint(1, 9))]
        found.append(draw.choice(("", " ")).join(parts))
    return found[:count]
