"""A tokenizer inside a GGUF file gives the ids of the one that was written there."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from checkpoint.gguf_reader import contents, open_gguf
from checkpoint.pieces import PieceKind
from checkpoint.vocabulary import checkpoint_fingerprint, read_token_ids, read_tokenizer
from runtime.errors import ConfigError
from tests.unit.checkpoint.sentencepiece_models import ids_of, model_of
from tests.unit.checkpoint.texts import CORPUS, texts
from tests.unit.tokenizer_svc.building import Text, conversation
from tokenizer_svc.text.checkpoint import load_checkpoint

CONTROL = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<｜end▁of▁turn｜>")
MARKUP = ("<think>", "</think>", "<tool_call>")
TEXTS = texts(400, extra=(*CONTROL, *MARKUP))
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def trained(splits: Any, normalizer: Any = None) -> Tokenizer:
    """Byte-level BPE of a few hundred tokens, with control tokens and markup."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splits
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in CONTROL])
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in MARKUP])
    return tokenizer


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def write(path: Path, model: str, fields: dict[str, Any]) -> Path:
    """A GGUF file of metadata alone, with `fields` under tokenizer.ggml (or tokenizer, where the name says
    so).
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    for name, value in fields.items():
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_fields(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """As llama.cpp's converter writes a tokenizer.json."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [
        PieceKind.CONTROL
        if token in CONTROL
        else PieceKind.USER_DEFINED
        if token in MARKUP
        else PieceKind.NORMAL
        for token in tokens
    ]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "pre": pre,
        "tokens": tokens,
        "token_type": [int(kind) for kind in kinds],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": ids["<|begin|>"],
        "eos_token_id": ids["<|im_end|>"],
        "eot_token_id": ids["<｜end▁of▁turn｜>"],
        "tokenizer.chat_template": TEMPLATE,
    }


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])


@pytest.mark.parametrize(
    ("pre", "splits", "normalizer"),
    [
        ("qwen2", by_pattern(PRETOKENIZE_REGEX), normalizers.NFC()),
        ("gpt-2", GPT2, None),
        ("smollm", DIGITS, None),
    ],
)
def test_ids_are_those_of_the_tokenizer_that_was_written(
    pre: str, splits: Any, normalizer: Any, tmp_path: Path
) -> None:
    original = trained(splits, normalizer)
    path = write(tmp_path / "m.gguf", "gpt2", byte_level_fields(original, pre))
    converted = Tokenizer.from_str(read_tokenizer(path).tokenizer_json)
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False)
        assert converted.encode(text, add_special_tokens=False).ids == expected.ids, text
        assert converted.decode(expected.ids, skip_special_tokens=False) == original.decode(
            expected.ids, skip_special_tokens=False
        )


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "dbrx"])
def test_texts_are_split_as_transformers_does(pre: str, tmp_path: Path) -> None:
    fields = byte_level_fields(trained(GPT2), pre)
    # Its conversion adds no control token outside of the byte-level alphabet.
    fields["token_type"][fields["eot_token_id"]] = int(PieceKind.NORMAL)
    path = write(tmp_path / "m.gguf", "gpt2", fields)
    oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    converted = Tokenizer.from_str(read_tokenizer(path).tokenizer_json)
    for drawn in texts(400, extra=(*CONTROL[:3], *MARKUP)):
        # Which does not compose characters.
        text = unicodedata.normalize("NFC", drawn)
        expected = oracle.encode(text, add_special_tokens=False)
        assert converted.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False)])
def test_a_word_that_no_merges_make_is_a_token_in_some_families(
    pre: str, is_whole: bool, tmp_path: Path
) -> None:
    fields = byte_level_fields(trained(GPT2), pre)
    fields["tokens"].append("Zebrafish")
    fields["token_type"].append(int(PieceKind.NORMAL))
    path = write(tmp_path / "m.gguf", "gpt2", fields)
    found = Tokenizer.from_str(read_tokenizer(path).tokenizer_json)
    tokens = found.encode("Zebrafish", add_special_tokens=False).tokens
    assert (tokens == ["Zebrafish"]) == is_whole


@pytest.mark.parametrize("name", ["llama", "gemma", "bpe_unknown", "unigram"])
def test_pieces_with_scores_are_cut_as_sentencepiece_does(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    normalizer = model.normalizer_spec
    is_unigram = name == "unigram"
    fields: dict[str, Any] = {
        "tokens": [each.piece.encode() for each in model.pieces],
        "scores": [each.score for each in model.pieces],
        "token_type": [each.type or 1 for each in model.pieces],
        "add_space_prefix": not normalizer.HasField("add_dummy_prefix") or normalizer.add_dummy_prefix,
        "remove_extra_whitespaces": is_unigram or name == "bpe_unknown",
        "add_bos_token": False,
    }
    if is_unigram:
        fields["precompiled_charsmap"] = list(normalizer.precompiled_charsmap)
    path = write(tmp_path / "m.gguf", "t5" if is_unigram else "llama", fields)
    converted = Tokenizer.from_str(read_tokenizer(path).tokenizer_json)
    for text, expected in ids_of(name):
        # Two marks of a space, typed: one of the user's pieces there.
        if name != "gemma" or "▁" not in text:
            found = converted.encode(text).ids
            # Cuts in another order have the same sum of scores.
            assert found == expected or (is_unigram and sorted(found) == sorted(expected)), text


def test_metadata_is_what_the_package_reads(tmp_path: Path) -> None:
    fields = byte_level_fields(trained(GPT2), "gpt-2") | {
        "none": [""],
        "scores": [1.5, -2.0],
        "flags": [True, False],
        "nested": [[1, 2], [3, 4]],
        "precompiled_charsmap": [1, 255],
    }
    path = write(tmp_path / "m.gguf", "gpt2", fields)
    expected = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert {name: contents(path, field) for name, field in open_gguf(path).fields.items()} == expected


def test_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gpt2", byte_level_fields(trained(GPT2), "gpt-2"))
    whole = path.read_bytes()
    for size in range(0, len(whole), 997):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"m\.gguf is not a whole GGUF file: .*; copy or download it"):
            read_tokenizer(path)


def test_control_tokens_templates_and_ends_are_the_files_own(tmp_path: Path) -> None:
    fields = byte_level_fields(trained(GPT2), "llama-bpe")
    fields |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "T"}
    path = write(tmp_path / "m.gguf", "gpt2", fields)
    files = read_tokenizer(path)
    assert files.config["bos_token"] == "<|begin|>"
    assert files.config["chat_template"] == [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "T"},
    ]
    assert read_token_ids(path).end == (fields["eos_token_id"], fields["eot_token_id"])
    # Llama 3's files from before there was a flag begin with it.
    ids = Tokenizer.from_str(files.tokenizer_json).encode("a").ids
    assert ids[0] == fields["bos_token_id"]


def test_what_ends_a_turn_is_a_control_token_whatever_the_file_calls_it(tmp_path: Path) -> None:
    fields = byte_level_fields(trained(GPT2), "gpt-2")
    fields["token_type"] = [int(PieceKind.NORMAL)] * len(fields["tokens"])
    checkpoint = load_checkpoint(write(tmp_path / "m.gguf", "gpt2", fields))
    assert checkpoint.eos_token_ids == (fields["eos_token_id"], fields["eot_token_id"])
    assert {*checkpoint.eos_token_ids, fields["bos_token_id"]} == {*checkpoint.vocabulary.special_ids}


def test_what_lies_beside_the_file_wins(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gpt2", byte_level_fields(trained(GPT2), "gpt-2"))
    inside = checkpoint_fingerprint(path)
    assert checkpoint_fingerprint(tmp_path) == inside
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "beside"}')
    assert read_tokenizer(path).config["chat_template"] == "beside"
    assert read_tokenizer(path).config["eos_token"] == "<|im_end|>"
    other = trained(DIGITS)
    other.save(str(tmp_path / "tokenizer.json"))
    assert checkpoint_fingerprint(path) != inside
    assert (
        Tokenizer.from_str(read_tokenizer(path).tokenizer_json).encode("2026").ids == other.encode("2026").ids
    )


def test_a_clients_text_is_no_control_token_of_the_file(tmp_path: Path) -> None:
    fields = byte_level_fields(trained(GPT2), "gpt-2")
    text = Text(write(tmp_path / "m.gguf", "gpt2", fields))
    ids = text.ids(conversation([{"role": "user", "content": "a<|im_end|>b"}]))
    assert [each for each in ids if each in text.checkpoint.vocabulary.special_ids] == [
        fields["bos_token_id"],
        fields["tokens"].index("<|im_start|>"),
        fields["eos_token_id"],
    ]
    joined = b"".join(text.checkpoint.vocabulary.tokens[each] for each in ids)
    assert joined.decode() == "<|begin|><|im_start|>a<|im_end|>b<|im_end|>"


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("gpt2", {"pre": "martian"}, r"tokenizer\.ggml\.pre = 'martian' is not known; known are .*llama-bpe"),
        ("gpt2", {"tokens": None}, r"it holds no tokenizer \(tokenizer\.ggml\.tokens\)"),
        ("gpt2", {"merges": ["x y"]}, "its tokenizer cannot be used"),
        ("bert", {}, "tokenizer.ggml.model = 'bert' is not supported, only gpt2, llama and t5"),
        ("llama", {}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_what_cannot_be_used_is_named_with_the_remedy(
    model: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    fields = byte_level_fields(trained(GPT2), "gpt-2") | changes
    path = write(tmp_path / "m.gguf", model, {key: each for key, each in fields.items() if each is not None})
    with pytest.raises(ConfigError, match=said) as refused:
        read_tokenizer(path)
    assert str(path) in str(refused.value)
    assert "put tokenizer.json and tokenizer_config.json of the original checkpoint beside" in str(
        refused.value
    )
