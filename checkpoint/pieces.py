"""SentencePiece's vocabularies, which tokenizer.model and GGUF files hold, as the `tokenizers` library reads
them.

Ids are SentencePiece's own, with these exceptions. A piece that the user defined splits a text before all
else; its spaces are spaces of the text, not their marks. A piece that is unused is not merged to. Of two cuts
whose scores have the same sum the library may take the other one: it adds them up in another precision.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPACE = "▁"
# Where a space is put in front: of every stretch between control tokens, of the whole text, or nowhere.
Prefix = Literal["each", "first", "none"]


class PieceKind(IntEnum):
    """What a piece is, by the number that both formats write."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """A vocabulary: text, score and kind of every piece by id."""

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    # Cuts a text so that the sum of the scores is highest; else the pair with the highest score is merged
    # until there is none.
    is_unigram: bool = False
    # Replacements of characters, as SentencePiece compiles them.
    charsmap: bytes = b""
    prefix: Prefix = "each"
    # Drops spaces at both ends, and all but one of those that follow each other.
    drops_spaces: bool = False


def converted(pieces: Pieces) -> Tokenizer:
    """The same ids for every text. Raises ValueError for what is no vocabulary."""
    # The user's own pieces are looked for in the text as it was written.
    texts = [
        text.replace(SPACE, " ") if kind == PieceKind.USER_DEFINED else text
        for text, kind in zip(pieces.texts, pieces.kinds, strict=True)
    ]
    has_bytes = PieceKind.BYTE in pieces.kinds
    unknown = pieces.kinds.index(PieceKind.UNKNOWN) if PieceKind.UNKNOWN in pieces.kinds else None
    model: models.Model
    if pieces.is_unigram:
        weighed = list(zip(texts, _unigram_scores(pieces), strict=True))
        model = models.Unigram(weighed, unk_id=unknown, byte_fallback=has_bytes)
    else:
        model = models.BPE(
            vocab={text: token_id for token_id, text in enumerate(texts)},
            merges=_merges(pieces),
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(pieces)
    tokenizer.pre_tokenizer = _pre_tokenizer(pieces)
    steps = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if has_bytes else []), decoders.Fuse()]
    if pieces.prefix != "none":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    add_tokens(tokenizer, texts, pieces.kinds)
    return tokenizer


def add_tokens(tokenizer: Tokenizer, texts: list[str], kinds: list[int]) -> None:
    """Makes of control tokens, and of those that the user defined, what splits a text before all else."""
    tokenizer.add_tokens(
        [
            AddedToken(text, special=kind != PieceKind.USER_DEFINED, normalized=False)
            for text, kind in zip(texts, kinds, strict=True)
            if text and kind in (PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.USER_DEFINED)
        ]
    )


def surround(tokenizer: Tokenizer, texts: list[str], front: int | None, end: int | None) -> None:
    """Has plain prompts begin and end with these tokens."""
    ids = [token_id for token_id in (front, end) if token_id is not None]
    if ids:
        first = [] if front is None else [texts[front]]
        last = [] if end is None else [texts[end]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(texts[token_id], token_id) for token_id in dict.fromkeys(ids)],
        )


def _normalizer(pieces: Pieces) -> normalizers.Normalizer | None:
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.drops_spaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if pieces.prefix == "each":
        steps.append(normalizers.Prepend(SPACE))
    if pieces.prefix != "first":
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps) if steps else None


def _pre_tokenizer(pieces: Pieces) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pieces.prefix == "first":
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    if pieces.is_unigram and PieceKind.BYTE in pieces.kinds:
        # The library finds bytes in the text by their names, where SentencePiece does not.
        steps.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous"))
    return pre_tokenizers.Sequence(steps)


def _unigram_scores(pieces: Pieces) -> list[float]:
    """What is unused is taken where nothing else is better."""
    kinds = zip(pieces.scores, pieces.kinds, strict=True)
    lowest = min((score for score, kind in kinds if kind == PieceKind.NORMAL), default=0.0)
    return [
        lowest if kind == PieceKind.UNUSED else score
        for score, kind in zip(pieces.scores, pieces.kinds, strict=True)
    ]


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Every pair that makes a piece, best first. Of pairs that make the same one, the longer left part comes
    first, since runs of a character are merged from the left.
    """
    scores = {
        text: score
        for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
        if kind == PieceKind.NORMAL
    }
    pairs = [
        # Pieces of equal scores in the order of their ids.
        (-score, rank, -cut, text)
        for rank, (text, score) in enumerate(scores.items())
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return [(text[:-negative], text[-negative:]) for _, _, negative, text in sorted(pairs)]
