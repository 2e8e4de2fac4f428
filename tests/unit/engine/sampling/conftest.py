"""The bundled model's tokenizer, and what makes masks of its grammars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tokenizers

from engine.sampling.grammar import GrammarEngine

BUNDLED = Path("models/millrace-nano")


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine() -> Iterator[GrammarEngine]:
    with closing(GrammarEngine(BUNDLED, 2048, [2, 0])) as engine:
        yield engine
