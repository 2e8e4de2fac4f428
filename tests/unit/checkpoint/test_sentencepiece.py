"""tokenizer.model gives SentencePiece's own ids, and what old checkpoints keep beside it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from checkpoint.vocabulary import checkpoint_fingerprint, read_tokenizer
from runtime.errors import ConfigError
from tests.unit.checkpoint.sentencepiece_models import NAMES, ids_of, model_of
from tokenizer_svc.text.checkpoint import load_checkpoint

EXCEPTED = {
    # The mark of a space, typed twice: it is one of the user's pieces there.
    "gemma": ("▁",),
    # In front of one of the user's pieces, no space is put here, as in transformers.
    "unigram_unknown": ("<x>",),
}


def write(folder: Path, name: str = "llama", **config: Any) -> Path:
    """A checkpoint without tokenizer.json."""
    (folder / "tokenizer.model").write_bytes(model_of(name).SerializeToString())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_str(read_tokenizer(folder).tokenizer_json)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tmp_path, name, add_bos_token=False))
    compared = 0
    for text, expected in ids_of(name):
        if any(odd in text for odd in EXCEPTED.get(name, ())):
            continue
        compared += 1
        found = tokenizer.encode(text).ids
        # Cuts in another order have the same sum of scores.
        assert found == expected or (name.startswith("unigram") and sorted(found) == sorted(expected)), text
    assert compared > 150


def test_other_cuts_of_the_same_score_are_rare(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tmp_path, "unigram", add_bos_token=False))
    equal = sum(tokenizer.encode(text).ids == expected for text, expected in ids_of("unigram"))
    assert equal > 0.95 * len(ids_of("unigram"))


def test_texts_come_back_from_their_ids(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write(tmp_path))
    for text, ids in ids_of("llama"):
        # A space that was typed as the mark of one is a space.
        assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_a_prompt_begins_as_the_checkpoint_says(tmp_path: Path) -> None:
    plain = tokenizer_of(write(tmp_path, add_bos_token=False)).encode("the sea").ids
    assert tokenizer_of(write(tmp_path)).encode("the sea").ids == [1, *plain]
    both = tokenizer_of(write(tmp_path, add_eos_token=True)).encode("the sea").ids
    assert both == [1, *plain, 2]


def test_a_space_goes_in_front_of_the_text_alone_where_legacy_is_off(tmp_path: Path) -> None:
    every = tokenizer_of(write(tmp_path)).encode("</s>the", add_special_tokens=False).tokens
    first = tokenizer_of(write(tmp_path, legacy=False)).encode("</s>the", add_special_tokens=False).tokens
    assert (every[0], every[1][0]) == ("</s>", "▁")
    assert first[0] == "</s>"
    assert not first[1].startswith("▁")


def test_tokens_that_were_added_later_follow_the_vocabulary(tmp_path: Path) -> None:
    size = len(model_of("llama").pieces)
    write(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size, "<|im_start|>": size + 1}))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.eos_token_ids == (size,)
    assert checkpoint.vocabulary.tokens[size + 1] == b"<|im_start|>"
    assert checkpoint.bos_token_id == 1
    assert len(checkpoint.vocabulary.byte_ids) == 256
    assert checkpoint.vocabulary.fingerprint == checkpoint_fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs", "not a SentencePiece model"),
        (b"", "it has no pieces"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x04", "trainer_spec.model_type = 4 is not supported"),
    ],
)
def test_what_is_no_model_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as refused:
        read_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.model") in str(refused.value)


def test_a_checkpoint_without_any_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor tokenizer\.model; copy them there"):
        read_tokenizer(tmp_path)
