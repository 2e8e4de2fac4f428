"""Reads what a checkpoint says about text: tokenizer, chat templates, special tokens, generation defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from services import hub
from services.config import ModelConfig
from services.errors import ConfigError
from services.vocabulary import checkpoint_fingerprint, whole_tokenizer_json
from tokenizer_svc.config import BUNDLED_CHECKPOINT
from tokenizer_svc.text.vocabulary import Vocabulary, build_vocabulary

DEFAULT_TEMPLATE = "default"
_LONG_PARTS = ("vocab", "merges")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The text side of a checkpoint, read once at start."""

    path: Path
    # tokenizer.json with the tokens that only tokenizer_config.json declares added.
    tokenizer_json: str
    # The same as a table, without vocabulary and merges, which take many times their text as objects.
    description: dict[str, Any]
    vocabulary: Vocabulary
    # Chat templates by name; empty when the checkpoint has none.
    templates: dict[str, str]
    # Variables such as bos_token that templates may print.
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_config_json: str


def locate(model: ModelConfig, *, simulated: bool) -> Path:
    """The directory with tokenizer.json; raises ConfigError saying what is missing.

    A hub id is looked up in the local Hugging Face cache and downloaded if it is not there. In simulated mode
    the bundled checkpoint stands in.
    """
    path = Path(model.path)
    if path.suffix == ".gguf":
        # The tokenizer lies beside the weights.
        path = path.parent
    if (path / "tokenizer.json").is_file():
        return path
    if path.is_dir():
        raise ConfigError(f"model.path: {path} has no tokenizer.json; a fast tokenizer is needed")
    if simulated:
        if not (BUNDLED_CHECKPOINT / "tokenizer.json").is_file():
            raise ConfigError(f"model.path: neither {path} nor the bundled {BUNDLED_CHECKPOINT} is there")
        return BUNDLED_CHECKPOINT
    return hub.download(model.path, weights=False)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads the directory; raises ConfigError naming the file at fault."""
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"{path}: tokenizer.json is missing; a fast tokenizer is needed")
    config = _read_json(path / "tokenizer_config.json") or {}
    tokenizer = _load_tokenizer(path, config)
    fingerprint = checkpoint_fingerprint(path)
    tokenizer_json = tokenizer.to_str()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    description = json.loads(tokenizer_json)
    vocabulary = build_vocabulary(description, ids, fingerprint)
    for name in _LONG_PARTS:
        description["model"].pop(name, None)
    special_tokens = _special_tokens(config)
    generation = _read_json(path / "generation_config.json")
    return Checkpoint(
        path=path,
        tokenizer_json=tokenizer_json,
        description=description,
        vocabulary=vocabulary,
        templates=_read_templates(path, config),
        special_tokens=special_tokens,
        eos_token_ids=_eos_ids(special_tokens, ids, generation or {}, _read_json(path / "config.json") or {}),
        bos_token_id=ids.get(special_tokens.get("bos_token", "")),
        generation_config_json=json.dumps(generation) if generation else "",
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return value


def _load_tokenizer(path: Path, config: dict[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(whole_tokenizer_json(path))
    except Exception as error:
        raise ConfigError(f"{path / 'tokenizer.json'}: not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        if tokenizer.token_to_id(token["content"]) is None or tokenizer.id_to_token(int(token_id)) is None:
            raise ConfigError(
                f"{path / 'tokenizer_config.json'}: added_tokens_decoder.{token_id} does not continue "
                "the vocabulary of tokenizer.json"
            )
    return tokenizer


def _read_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja, then chat_template.json, then tokenizer_config.json; further named ones beside."""
    templates: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        templates[DEFAULT_TEMPLATE] = declared
    elif isinstance(declared, list):
        templates.update({each["name"]: each["template"] for each in declared})
    legacy = (_read_json(path / "chat_template.json") or {}).get("chat_template")
    if isinstance(legacy, str):
        templates[DEFAULT_TEMPLATE] = legacy
    if (path / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_ids(
    special_tokens: dict[str, str],
    ids: dict[str, int],
    generation: dict[str, Any],
    model: dict[str, Any],
) -> tuple[int, ...]:
    declared = generation.get("eos_token_id", model.get("eos_token_id"))
    listed = declared if isinstance(declared, list) else [declared]
    named = ids.get(special_tokens.get("eos_token", ""))
    return tuple(dict.fromkeys(each for each in (*listed, named) if isinstance(each, int)))
