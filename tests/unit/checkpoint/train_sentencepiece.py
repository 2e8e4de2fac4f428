"""Trains the models of the tests and writes the ids that the `sentencepiece` package gives for their texts.

It is run where that package is, which is no dependency: `python -m
tests.unit.checkpoint.train_sentencepiece` in an environment with `pip install sentencepiece==0.2.1`.
`--texts N` compares so many texts with the conversion instead, which needs this suite's packages as well.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

from tests.unit.checkpoint.texts import CORPUS, texts

FOLDER = Path(__file__).parent / "sentencepiece"
NUM_TEXTS = 250
_COMMON: dict[str, Any] = {
    "vocab_size": 640,
    "hard_vocab_limit": False,
    "character_coverage": 0.98,
    "num_threads": 1,
    "max_sentence_length": 10000,
    "minloglevel": 2,
}
# As Llama and Mistral have it.
_LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
# Code points in hexadecimal: full-width A, the ligature fi, a wide space, a tab, e with an accent.
_RULES = "FF21\t41\nFB01\t66 69\n3000\t20\n9\t20\n65 301\tE9\n"
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    # As Gemma: no space in front, and pieces of its own that are never cut.
    "gemma": _LLAMA
    | {
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<x>", "[INST]", "▁▁", "▁▁▁", "▁▁▁▁"],
        "control_symbols": ["<start_of_turn>"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
    },
    # Characters are replaced; the rule that models usually have, nmt_nfkc, is compared by --texts.
    "unigram": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_tsv": _RULES},
    # What is not in the vocabulary is unknown.
    "unigram_unknown": {
        "model_type": "unigram",
        "vocab_size": 300,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["<x>"],
    },
    "bpe_unknown": {"model_type": "bpe", "vocab_size": 300, "normalization_rule_name": "identity"},
}


def train(options: dict[str, Any]) -> bytes:
    """A model as tokenizer.model holds it."""
    written = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        given = _COMMON | options
        if given.get("normalization_rule_tsv"):
            rules.write(given["normalization_rule_tsv"])
            rules.flush()
            given["normalization_rule_tsv"] = rules.name
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 20), model_writer=written, **given
        )
    return written.getvalue()


def main() -> None:
    """Writes, for each model, NAME.model and NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=0, help="compare, and write nothing")
    compared = parser.parse_args().texts
    FOLDER.mkdir(exist_ok=True)
    usual = {"normalization_rule_tsv": "", "normalization_rule_name": "nmt_nfkc"}
    models = MODELS | ({"nmt_nfkc": MODELS["unigram"] | usual} if compared else {})
    for name, options in models.items():
        model = train(options)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        if compared:
            _compare(name, model, processor, compared)
            continue
        (FOLDER / f"{name}.model").write_bytes(model)
        ids = [processor.encode(text) for text in texts(NUM_TEXTS)]
        (FOLDER / f"{name}.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")


def _compare(name: str, model: bytes, processor: Any, count: int) -> None:
    from millrace.tokenizer.internal.v1.sentencepiece_pb2 import SentencePieceModel

    from checkpoint.sentencepiece import converted

    tokenizer = converted(SentencePieceModel.FromString(model), {"add_bos_token": False})
    other = [text for text in texts(count) if tokenizer.encode(text).ids != processor.encode(text)]
    print(f"{name}: {len(other)} of {count} texts have other ids", *map(repr, other[:5]), sep="\n  ")


if __name__ == "__main__":
    main()
