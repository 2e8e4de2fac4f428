"""The byte-level BPE tokenizer: trained on the corpus, every byte representable, every digit a token of
its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.chat_format import CHAT_TEMPLATE, END_OF_TEXT, IM_END, IM_START, segments
from models.corpus import Mixture, documents

VOCABULARY_SIZE = 2048
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END, *(f"<|reserved_{index}|>" for index in range(7)))
"""Ids 0 to 9; dropped when text is decoded for people."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Ids 10 to 15; one token each, yet part of the visible text, as parsers of tool calls and reasoning need
them."""

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus_text(num_documents: int, seed: int) -> Iterator[str]:
    """Text to learn merges from, without control and markup tokens."""
    for document in islice(documents(Mixture(sequence_length=512, recall_share=0.35), seed), num_documents):
        text = "".join(text for text, _ in segments(document))
        for token in CONTROL_TOKENS + MARKUP_TOKENS:
            text = text.replace(token, "")
        yield text


def train_tokenizer(num_documents: int = 60_000, seed: int = 7) -> Tokenizer:
    """Learn the merges. The same arguments give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS + MARKUP_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_text(num_documents, seed), trainer)
    return _with_visible_markup(tokenizer)


def _with_visible_markup(tokenizer: Tokenizer) -> Tokenizer:
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return Tokenizer.from_str(json.dumps(description))


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n"
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Learn the vocabulary anew; every model must then be retrained."
    )
    parser.add_argument(
        "folder", type=Path, help="where tokenizer.json and tokenizer_config.json are written"
    )
    save_tokenizer(train_tokenizer(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
