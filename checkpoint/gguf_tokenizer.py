"""The tokenizer and the chat templates that a GGUF file holds itself.

The keys are llama.cpp's. Byte-level vocabularies ("gpt2") come with their merges and the name of the pattern
that splits texts; SentencePiece's ("llama", "t5") with a score for every piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoint.pieces import PieceKind, Pieces, add_tokens, surround
from checkpoint.pieces import converted as converted_pieces
from runtime.errors import ConfigError

_PREFIX = "tokenizer."
_REMEDY = "put tokenizer.json and tokenizer_config.json of the original checkpoint beside it"
# Name in tokenizer_config.json to key of the metadata.
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    return rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|{digits}|{_MARKS}{_REST}"


def _cased_words(suffixes: str, digits: str) -> str:
    marks = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    first, second = f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"
    return f"{_BEFORE}{first}{suffixes}|{_BEFORE}{second}{suffixes}|{digits}|{marks}{_REST}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_GPT4O = _cased_words(f"{_SUFFIXES}?", r"\p{N}{1,3}")
# Name in tokenizer.ggml.pre to the pattern whose matches are encoded each by itself, as in the tokenizer.json
# of these models.
_PATTERNS: Mapping[str, str] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    "tekken": _cased_words("", r"\p{N}"),
}
# GPT-2's own pattern, which the library has; the second group cuts digits apart before.
_AS_GPT2 = ("gpt-2", "olmo", "mpt", "jais", "phi-2", "exaone4")
_AS_GPT2_BY_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
# A word that is a token is not built from merges.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
# Composed characters first, as in these models' tokenizer.json.
_NFC = ("qwen2", "deepseek-r1-qwen")


def read(path: Path) -> dict[str, Any]:
    """What the metadata says of the tokenizer, by the keys after "tokenizer.". Raises ConfigError."""
    # The package, and numpy with it, is imported by those who have such a file.
    from checkpoint.gguf_reader import contents, open_gguf

    return {
        name.removeprefix(_PREFIX): contents(path, field)
        for name, field in open_gguf(path).fields.items()
        if name.startswith(_PREFIX)
    }


def fingerprint(path: Path) -> str:
    """SHA-256 of the vocabulary with everything that decides ids. Raises ConfigError."""
    from checkpoint.gguf_reader import open_gguf

    digest = hashlib.sha256()
    for name, field in sorted(open_gguf(path).fields.items()):
        if name.startswith(f"{_PREFIX}ggml."):
            digest.update(name.encode())
            for part in field.parts:
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part.tobytes())
    return digest.hexdigest()


def config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same under the keys of tokenizer_config.json."""
    texts = metadata.get("ggml.tokens", [])
    found: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        token_id = metadata.get(f"ggml.{key}")
        if token_id is not None and token_id < len(texts):
            found[name] = texts[token_id]
    templates = {"default": metadata.get("chat_template")} | {
        name: metadata.get(f"chat_template.{name}") for name in metadata.get("chat_templates", ())
    }
    named = [{"name": name, "template": text} for name, text in templates.items() if text]
    return found | ({"chat_template": named} if named else {})


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """All tokens that end an answer."""
    found = (metadata.get(f"ggml.{key}") for key in _END_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def used_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids by text, without those that converters fill the vocabulary up with."""
    texts = metadata.get("ggml.tokens") or []
    return {texts[place]: place for place in used_places(metadata)}


def used_places(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of `used_ids`, and those that have the text of another one."""
    texts = metadata.get("ggml.tokens") or []
    kinds = _kinds(metadata, len(texts))[: len(texts)]
    return [place for place, kind in enumerate(kinds) if kind != PieceKind.UNUSED]


def converted(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer. Raises ConfigError that says what to put beside the file."""
    model = metadata.get("ggml.model")
    if not metadata.get("ggml.tokens"):
        raise ConfigError(f"it holds no tokenizer (tokenizer.ggml.tokens); {_REMEDY}")
    texts = metadata["ggml.tokens"]
    kinds = _kinds(metadata, len(texts))
    try:
        match model:
            case "gpt2":
                tokenizer = _byte_level(metadata, texts, kinds)
            case "llama" | "t5":
                tokenizer = converted_pieces(_pieces(metadata, texts, kinds))
            case _:
                raise ConfigError(
                    f"tokenizer.ggml.model = {model!r} is not supported, only gpt2, llama and t5; {_REMEDY}"
                )
        # Files from before there was a flag have none.
        has_front = model == "llama" or metadata.get("ggml.pre") in _WHOLE_WORDS
        front = _token_put(metadata, "bos", by_default=has_front)
        surround(tokenizer, texts, front, _token_put(metadata, "eos", by_default=model == "t5"))
    except ConfigError:
        raise
    # The library's own errors have no type.
    except Exception as error:
        raise ConfigError(f"its tokenizer cannot be used: {error}; {_REMEDY}") from error
    return tokenizer


def _kinds(metadata: Mapping[str, Any], count: int) -> list[int]:
    """What each token is. One that begins or ends a turn is never shown, whatever the file calls it."""
    kinds = list(metadata.get("ggml.token_type") or [PieceKind.NORMAL] * count)
    for key in ("bos_token_id", *_END_KEYS):
        token_id = metadata.get(f"ggml.{key}")
        if token_id is not None and token_id < count:
            kinds[token_id] = PieceKind.CONTROL
    return kinds


def _byte_level(metadata: Mapping[str, Any], texts: list[str], kinds: list[int]) -> Tokenizer:
    pre = metadata.get("ggml.pre", "")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("ggml.merges", ())]
    vocab = {text: token_id for token_id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split(pre)
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, texts, kinds)
    return tokenizer


def _split(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _PATTERNS:
        by_pattern = pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([by_pattern, to_bytes])
    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _AS_GPT2:
        return as_gpt2
    if pre in _AS_GPT2_BY_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2])
    known = ", ".join(sorted((*_PATTERNS, *_AS_GPT2, *_AS_GPT2_BY_DIGITS)))
    raise ConfigError(f"tokenizer.ggml.pre = {pre!r} is not known; known are {known}; {_REMEDY}")


def _pieces(metadata: Mapping[str, Any], texts: list[str], kinds: list[int]) -> Pieces:
    scores = metadata.get("ggml.scores")
    if scores is None:
        raise ConfigError(f"tokenizer.ggml.scores is missing; {_REMEDY}")
    is_unigram = metadata.get("ggml.model") == "t5"
    return Pieces(
        texts=texts,
        scores=scores,
        kinds=kinds,
        is_unigram=is_unigram,
        charsmap=bytes(metadata.get("ggml.precompiled_charsmap", b"")),
        prefix="each" if metadata.get("ggml.add_space_prefix", not is_unigram) else "none",
        drops_spaces=bool(metadata.get("ggml.remove_extra_whitespaces", False)),
    )


def _token_put(metadata: Mapping[str, Any], name: str, *, by_default: bool) -> int | None:
    """Id of the token that plain prompts get."""
    is_put = metadata.get(f"ggml.add_{name}_token", by_default)
    return metadata.get(f"ggml.{name}_token_id") if is_put else None
