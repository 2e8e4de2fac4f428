"""Token bytes join to what the Hugging Face decoder gives, for any ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from millrace.tokenizer.v1.tokenizer_pb2 import GetVocabularyResponse
from tokenizers import AddedToken, Tokenizer, decoders, models

from contract.vocabulary import DecoderKind
from gateway.text.detokenizer import TokenTexts, decode
from gateway.tokenizer.client import vocabulary
from runtime.errors import ConfigError
from tests.unit.byte_runs import shown_at_once
from tests.unit.tokenizer_svc.building import Text
from tests.unit.tokenizer_svc.checkpoints import metaspace, write
from tests.unit.tokenizer_svc.families import FAMILIES, GEMMA, make
from tokenizer_svc.messages.wire import vocabulary_response
from tokenizer_svc.text.checkpoint import Checkpoint, load_checkpoint


def told(checkpoint: Checkpoint, ids: list[int]) -> str:
    """The text as a gateway writes it by what it is told of the vocabulary."""
    message = GetVocabularyResponse.FromString(vocabulary_response(checkpoint).SerializeToString())
    return decode(TokenTexts(vocabulary(message)), ids)


def decoded(checkpoint: Checkpoint, ids: list[int]) -> str:
    """What the library makes of all ids at once, but for invalid runs of bytes."""
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    added = tokenizer.get_added_tokens_decoder()
    shown = [id_ for id_ in ids if id_ not in added or not added[id_].special]
    pieces = [piece for id_ in shown if (piece := tokenizer.id_to_token(id_)) is not None]
    if "ByteFallback" in str(checkpoint.description["decoder"]):
        pieces = shown_at_once(pieces)
    return str(tokenizer.decoder.decode(pieces))


@pytest.fixture(scope="module", params=FAMILIES)
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(make(request.param, tmp_path_factory.mktemp(request.param)))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(picks=st.lists(st.integers(0, 10_000), max_size=30))
def test_random_ids_decode_as_the_library_does(text: Text, picks: list[int]) -> None:
    ids = [pick % len(text.checkpoint.vocabulary.tokens) for pick in picks]
    assert told(text.checkpoint, ids) == decoded(text.checkpoint, ids)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(written=st.text(st.sampled_from("abc zü🙂東\n\x00"), max_size=40))
def test_texts_survive(text: Text, written: str) -> None:
    ids = text.encoder.encode_text(written, add_special_tokens=False)
    tokenizer = Tokenizer.from_str(text.checkpoint.tokenizer_json)
    assert told(text.checkpoint, ids) == tokenizer.decode(ids, skip_special_tokens=True)
    if not written.startswith(" "):
        assert told(text.checkpoint, ids) == written


def test_kinds(text: Text) -> None:
    spelled = text.checkpoint.description["decoder"]["type"]
    expected = DecoderKind.BYTE_LEVEL if spelled == "ByteLevel" else DecoderKind.SENTENCEPIECE
    assert text.checkpoint.vocabulary.decoder is expected


_REPLACE, _BYTES, _FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


@pytest.fixture(
    scope="module",
    params=[
        decoders.Sequence([_REPLACE, _BYTES, _FUSE]),
        decoders.Sequence([_REPLACE, _BYTES, _FUSE, decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("é", "e"), _REPLACE, _FUSE]),
        decoders.Sequence([_BYTES, decoders.Metaspace()]),
        decoders.Metaspace(replacement="_", prepend_scheme="always"),
        decoders.Metaspace(prepend_scheme="never"),
    ],
    ids=str,
)
def with_added_pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    tokenizer = metaspace(GEMMA)
    tokenizer.decoder = request.param
    # Gemma has such tokens: runs of spaces that are added tokens as well.
    pieces = ("▁▁", "▁▁▁", "\n\n", "a▁b", "_é", "<0x0a>")
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in pieces])
    return Text(write(tmp_path_factory.mktemp("pieces"), tokenizer))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(picks=st.lists(st.integers(0, 10_000), max_size=12))
def test_added_pieces_decode_as_the_library_does(with_added_pieces: Text, picks: list[int]) -> None:
    checkpoint = with_added_pieces.checkpoint
    num_tokens = len(checkpoint.vocabulary.tokens)
    # Every other one is among the last, which are the added ones.
    ids = [num_tokens - 1 - pick // 2 % 6 if pick % 2 else pick // 2 % num_tokens for pick in picks]
    assert told(checkpoint, ids) == decoded(checkpoint, ids)


@pytest.mark.parametrize(
    "step", [decoders.Strip(" ", 2, 0), decoders.Replace("a", "b"), decoders.Metaspace(), decoders.CTC()]
)
def test_a_step_of_the_decoder_that_would_be_left_out_is_refused(
    step: decoders.Decoder, tmp_path: Path
) -> None:
    tokenizer = metaspace(GEMMA)
    tokenizer.decoder = decoders.Sequence([_REPLACE, _FUSE, step])
    with pytest.raises(ConfigError, match=type(step).__name__):
        load_checkpoint(write(tmp_path, tokenizer))


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        load_checkpoint(write(tmp_path, tokenizer))


def test_end_tokens_and_generation_defaults(tmp_path: Path) -> None:
    from tests.unit.tokenizer_svc.checkpoints import byte_level
    from tests.unit.tokenizer_svc.families import CHATML

    tokenizer = byte_level(CHATML)
    end, text_end = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    generation = {"eos_token_id": [text_end], "temperature": 0.6}
    checkpoint = load_checkpoint(
        write(tmp_path, tokenizer, config={"eos_token": "<|im_end|>"}, generation=generation)
    )
    assert checkpoint.eos_token_ids == (text_end, end)
    assert '"temperature": 0.6' in checkpoint.generation_config_json
