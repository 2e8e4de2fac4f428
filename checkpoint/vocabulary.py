"""A checkpoint's vocabulary and its identity, read the same way by the tokenizer service and the engine.

It is that of tokenizer.json, also of one beside a GGUF file. Where there is none, a GGUF file's own tokenizer
or SentencePiece's tokenizer.model is converted.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from checkpoint import gguf_tokenizer
from checkpoint.files import find, folder_of, is_gguf, read_json, tokenizer_file
from runtime.errors import ConfigError

_ADDED_TOKENS = "added_tokens_decoder"


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint's files say of its tokenizer."""

    # The content of tokenizer.json, with the added tokens as the configuration declares them, which has the
    # last word.
    tokenizer_json: str
    # tokenizer_config.json, over what a GGUF file or tokenizer.model says of the same keys.
    config: dict[str, Any]


class TokenIds(msgspec.Struct, frozen=True, kw_only=True):
    """The ids that a checkpoint's files give to tokens: the engine's, and the tokenizer service's."""

    # One above the highest id that a token has; rows of the head beyond it are padding. 0: no tokenizer.
    count: int = 0
    # The same of tokens that text is encoded to, without the special ones.
    num_of_text: int = 0
    # Ids below `count` that no token has, and that end no answer: rows of the head that were never trained.
    holes: tuple[int, ...] = ()
    # Every id that ends an answer, whoever of the files names it.
    end: tuple[int, ...] = ()


class _Token(msgspec.Struct):
    """An entry of `added_tokens` in tokenizer.json."""

    id: int
    content: str
    special: bool = False


# An id as a key of JSON.
_Id = Annotated[str, msgspec.Meta(pattern=r"^\d{1,10}$")]


class _Declared(msgspec.Struct):
    """An entry of `added_tokens_decoder` in tokenizer_config.json."""

    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    """What of tokenizer.json names ids."""

    model: _Model
    added_tokens: list[_Token] = []


def checkpoint_fingerprint(path: str | Path) -> str:
    """SHA-256 of what holds the checkpoint's tokenizer, lower-case hex. Raises ConfigError."""
    file = tokenizer_file(find(str(path)))
    if is_gguf(file):
        return gguf_tokenizer.fingerprint(file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_tokenizer(path: str | Path) -> TokenizerFiles:
    """Converts what is no tokenizer.json. Raises ConfigError that names the file at fault."""
    checkpoint = find(str(path))
    folder, file = folder_of(checkpoint), tokenizer_file(checkpoint)
    config: dict[str, Any] = {}
    if is_gguf(checkpoint):
        metadata = gguf_tokenizer.read(checkpoint)
        config = gguf_tokenizer.config(metadata)
    declared = _declared(folder)
    try:
        if is_gguf(file):
            text = gguf_tokenizer.converted(metadata).to_str()
        elif file.suffix == ".model":
            # Protobuf is imported by those who have such a file.
            from checkpoint import sentencepiece

            model = sentencepiece.read(file)
            config = sentencepiece.config(model, folder)
            text = sentencepiece.converted(model, config | declared).to_str()
        else:
            text = file.read_text(encoding="utf-8")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; copy or download it again") from error
    config |= declared
    return TokenizerFiles(
        tokenizer_json=_with_added(text, config.get(_ADDED_TOKENS, {}), file),
        config=config,
    )


def read_token_ids(checkpoint: Path) -> TokenIds:
    """The ids of a checkpoint that `find` found, read without building its tokenizer. Raises ConfigError that
    names the file at fault.
    """
    folder = folder_of(checkpoint)
    ends = [*_ends_in(folder / "generation_config.json"), *_ends_in(folder / "config.json")]
    config: dict[str, Any] = {}
    if is_gguf(checkpoint):
        metadata = gguf_tokenizer.read(checkpoint)
        config = gguf_tokenizer.config(metadata)
        ends += gguf_tokenizer.eos_token_ids(metadata)
    try:
        file = tokenizer_file(checkpoint)
    except ConfigError:
        return TokenIds(end=tuple(dict.fromkeys(ends)))
    special: set[str] = set()
    if is_gguf(file):
        ids = gguf_tokenizer.used_ids(metadata)
        used = set(gguf_tokenizer.used_places(metadata))
    elif file.suffix == ".model":
        from checkpoint import sentencepiece

        model = sentencepiece.read(file)
        config = sentencepiece.config(model, folder)
        ids = {each.piece: token_id for token_id, each in enumerate(model.pieces)}
        used = set(range(len(model.pieces)))
    else:
        ids, special, used = _ids_in(file)
    config |= _declared(folder)
    for token_id, token in config.get(_ADDED_TOKENS, {}).items():
        ids.setdefault(token["content"], int(token_id))
        special |= {token["content"]} if token.get("special") else set()
    end_text = config.get("eos_token")
    end_text = end_text.get("content") if isinstance(end_text, dict) else end_text
    ends += [ids[end_text]] if isinstance(end_text, str) and end_text in ids else []
    count = 1 + max(ids.values(), default=-1)
    # A tokenizer may lack the token that generation_config.json says to end with, which the model writes.
    holes = sorted(set(range(count)) - used - {*ids.values(), *ends})
    return TokenIds(
        count=count,
        holes=tuple(holes),
        num_of_text=1 + max((token_id for text, token_id in ids.items() if text not in special), default=-1),
        # An id without a token cannot be written.
        end=tuple(dict.fromkeys(token_id for token_id in ends if token_id < count or not count)),
    )


def _declared(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, where its added tokens are some. Raises ConfigError."""
    file = folder / "tokenizer_config.json"
    found = read_json(file) or {}
    if found.get(_ADDED_TOKENS) is None:
        # Older tools keep special tokens in a file of their own, which has the last word with them.
        found |= read_json(folder / "special_tokens_map.json") or {}
        return {key: value for key, value in found.items() if key != _ADDED_TOKENS}
    try:
        msgspec.convert(found[_ADDED_TOKENS], dict[_Id, _Declared])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_ADDED_TOKENS}: {error}; copy or download it again") from error
    return found


def _ids_in(file: Path) -> tuple[dict[str, int], set[str], set[int]]:
    """Ids by text in a tokenizer.json, the texts of special tokens, and all ids: some may have one text."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a tokenizer: {error}") from error
    vocab = found.model.vocab
    ids = vocab if isinstance(vocab, dict) else {text: place for place, (text, _) in enumerate(vocab)}
    used = set(ids.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    ids |= {token.content: token.id for token in found.added_tokens}
    return ids, {token.content for token in found.added_tokens if token.special}, used


def _ends_in(file: Path) -> list[int]:
    """`eos_token_id` of a file, which may name one, several or none."""
    value = (read_json(file) or {}).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
        raise ConfigError(f"{file}: eos_token_id = {value!r} is not a token id, or a list of them")
    return ids


def whole_tokenizer_json(path: str | Path) -> str:
    """See `TokenizerFiles.tokenizer_json`. Raises ConfigError."""
    return read_tokenizer(path).tokenizer_json


def _with_added(text: str, declared: dict[str, Any], file: Path) -> str:
    """tokenizer.json with the added tokens that `declared` has by id."""
    if not declared:
        return text
    try:
        description = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not a tokenizer: {error}") from error
    tokens: dict[str, dict[str, Any]] = {
        token["content"]: token for token in description.get("added_tokens") or ()
    }
    changed = False
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        content = token["content"]
        known = tokens.get(content)
        whole = {
            "id": known["id"] if known else int(token_id),
            "content": content,
            "single_word": token.get("single_word", False),
            "lstrip": token.get("lstrip", False),
            "rstrip": token.get("rstrip", False),
            "normalized": token.get("normalized", not token.get("special", False)),
            "special": token.get("special", False),
        }
        if known != whole:
            tokens[content] = whole
            changed = True
    if not changed:
        return text
    description["added_tokens"] = sorted(tokens.values(), key=lambda token: int(token["id"]))
    return json.dumps(description, ensure_ascii=False)
