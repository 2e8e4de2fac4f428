"""Any cut of the ids gives the text that Hugging Face's decoders give for all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from contract.vocabulary import DecoderKind
from gateway.text.detokenizer import TokenTexts, Vocabulary, decode, detokenizer
from tests.unit.byte_runs import shown_at_once
from tests.unit.gateway.rig.vocabulary import END_ID, SPECIAL_IDS, TOKENS

VOCABULARY = Vocabulary(
    fingerprint="f",
    decoder=DecoderKind.BYTE_LEVEL,
    tokens=TOKENS,
    special_ids=frozenset(SPECIAL_IDS),
)
# Bytes beside pieces: of characters, and some that are characters alone.
BYTES = (0xE2, 0x82, 0xAC, 0xFF, 0x0A, 0x20, 0x41)
PIECES = (*(f"<0x{byte:02X}>" for byte in BYTES), "▁the", "a", "▁é", "▁", "▁▁b▁")
_REPLACE, _BYTES, _FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
# What a vocabulary of pieces says of the spaces in front, and the decoder that it stands for.
REFERENCES = {
    DecoderKind.SENTENCEPIECE: decoders.Sequence(
        [_REPLACE, _BYTES, _FUSE, decoders.Strip(content=" ", left=1, right=0)]
    ),
    DecoderKind.BYTE_LEVEL: decoders.Sequence([_REPLACE, _BYTES, _FUSE]),
    DecoderKind.METASPACE: decoders.Sequence([_BYTES, decoders.Metaspace()]),
}


def of_pieces(kind: DecoderKind) -> Vocabulary:
    return Vocabulary(
        fingerprint="f",
        decoder=kind,
        tokens=(*(bytes([byte]) for byte in BYTES), *(p.replace("▁", " ").encode() for p in PIECES[7:])),
        byte_ids=frozenset(range(len(BYTES))),
    )


ids = st.lists(st.integers(0, len(TOKENS) - 1), max_size=40)
cuts = st.lists(st.integers(0, 40), max_size=6)


def in_pieces(vocabulary: Vocabulary, token_ids: list[int], at: list[int]) -> str:
    stream = detokenizer(TokenTexts(vocabulary))
    bounds = [0, *sorted(at), len(token_ids)]
    texts = [stream.feed(token_ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return "".join(texts) + stream.finish()


@given(ids, cuts)
def test_byte_level_equals_lossy_utf8_of_all_bytes(token_ids: list[int], at: list[int]) -> None:
    shown = b"".join(TOKENS[id_] for id_ in token_ids if id_ not in SPECIAL_IDS)
    assert in_pieces(VOCABULARY, token_ids, at) == shown.decode("utf-8", "replace")


@given(ids)
def test_byte_level_equals_hugging_face(token_ids: list[int]) -> None:
    alphabet = _byte_alphabet()
    shown = [id_ for id_ in token_ids if id_ not in SPECIAL_IDS]
    pieces = ["".join(alphabet[byte] for byte in TOKENS[id_]) for id_ in shown]
    assert decode(TokenTexts(VOCABULARY), token_ids) == decoders.ByteLevel().decode(pieces)


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=12), cuts)
@pytest.mark.parametrize("kind", REFERENCES)
def test_pieces_and_bytes_equal_hugging_face(kind: DecoderKind, token_ids: list[int], at: list[int]) -> None:
    expected = REFERENCES[kind].decode(shown_at_once([PIECES[id_] for id_ in token_ids]))
    assert in_pieces(of_pieces(kind), token_ids, at) == expected


def test_a_run_of_bytes_is_text_as_soon_as_it_is_characters_or_never_will_be() -> None:
    stream = detokenizer(TokenTexts(of_pieces(DecoderKind.SENTENCEPIECE)))
    euro, invalid, letter = [0, 1, 2], 3, 6
    assert [stream.feed([id_]) for id_ in euro] == ["", "", "€"]
    assert [stream.feed([id_]) for id_ in (euro[0], invalid, letter)] == ["", "\ufffd\ufffd", "\ufffd"]
    assert stream.feed([len(BYTES)]) == " the"
    assert [stream.feed([id_]) for id_ in (letter, euro[0])] == ["A", ""]
    assert stream.finish() == "\ufffd"


def test_character_over_tokens_appears_with_its_last_byte() -> None:
    stream = detokenizer(TokenTexts(VOCABULARY))
    assert [stream.feed([byte]) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert stream.feed([END_ID]) == ""


def _byte_alphabet() -> dict[int, str]:
    # GPT-2's map of bytes to printable characters.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(rest)}}
