"""Small models that SentencePiece trained, with its ids of the texts (see `train_sentencepiece`)."""

from __future__ import annotations

import json
from pathlib import Path

from millrace.tokenizer.internal.v1.sentencepiece_pb2 import SentencePieceModel

from tests.unit.checkpoint.texts import texts

FOLDER = Path(__file__).parent / "sentencepiece"
NAMES = sorted(path.stem for path in FOLDER.glob("*.model"))


def model_of(name: str) -> SentencePieceModel:
    """The model as it is read here."""
    return SentencePieceModel.FromString((FOLDER / f"{name}.model").read_bytes())


def ids_of(name: str) -> list[tuple[str, list[int]]]:
    """Texts, and SentencePiece's ids of each."""
    ids = json.loads((FOLDER / f"{name}.json").read_text())
    return list(zip(texts(len(ids)), ids, strict=True))
