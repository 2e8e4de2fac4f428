"""Reads what a checkpoint says about text: tokenizer, chat templates, special tokens, generation defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from checkpoint.files import find, folder_of, read_json, tokenizer_file
from checkpoint.pooling import read_pooling
from checkpoint.sampling_defaults import GENERATION_CONFIG, read_sampling_defaults
from checkpoint.vocabulary import TokenizerFiles, checkpoint_fingerprint, read_token_ids, read_tokenizer
from contract.pooling import PooledModel
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tokenizer_svc.config import BUNDLED_CHECKPOINT
from tokenizer_svc.text import formats
from tokenizer_svc.text.vocabulary import TokenizerVocabulary, build_vocabulary

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
    vocabulary: TokenizerVocabulary
    # Chat templates by name; empty when the checkpoint has none.
    templates: dict[str, str]
    # Names of the formats in which the model writes; empty: it has none.
    tool_call_format: str
    reasoning_format: str
    # Variables such as bos_token that templates may print.
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_config_json: str
    # See SamplingDefaults.
    sampling_sources: dict[str, str]
    # Where the model pools what it reads.
    pooled: PooledModel | None = None


def locate(model: ModelConfig, *, simulated: bool) -> Path:
    """Where the checkpoint is, see `checkpoint.files.find`. In simulated mode the bundled one stands in
    where there is no such directory. Raises ConfigError saying what is missing.
    """
    if not simulated or Path(model.path).exists():
        return find(model.path, weights=False)
    if not (BUNDLED_CHECKPOINT / "tokenizer.json").is_file():
        raise ConfigError(f"model.path: neither {model.path} nor the bundled {BUNDLED_CHECKPOINT} is there")
    return BUNDLED_CHECKPOINT


def load_checkpoint(path: Path, model: ModelConfig | None = None) -> Checkpoint:
    """Reads the checkpoint, of which `model` may replace template and formats. Raises ConfigError naming the
    file at fault.
    """
    model = model or ModelConfig()
    files = read_tokenizer(path)
    folder, config = folder_of(path), files.config
    tokenizer = _load_tokenizer(path, files)
    tokenizer_json = tokenizer.to_str()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    description = json.loads(tokenizer_json)
    vocabulary = build_vocabulary(description, ids, checkpoint_fingerprint(path))
    for name in _LONG_PARTS:
        description["model"].pop(name, None)
    special_tokens = _special_tokens(config)
    recommended, pooling = read_sampling_defaults(path), read_pooling(path)
    generation = (read_json(folder / GENERATION_CONFIG) or {}) | recommended.options
    templates = _read_templates(folder, config)
    if model.chat_template:
        templates = {DEFAULT_TEMPLATE: _read_text(Path(model.chat_template), "model.chat_template: ")}
    added = {token["content"] for token in description["added_tokens"]}
    return Checkpoint(
        path=path,
        tokenizer_json=tokenizer_json,
        description=description,
        vocabulary=vocabulary,
        templates=templates,
        tool_call_format=model.tool_call_parser or formats.tool_call_format(templates, added, special_tokens),
        reasoning_format=model.reasoning_parser or formats.reasoning_format(templates, added),
        special_tokens=special_tokens,
        eos_token_ids=read_token_ids(path).end,
        bos_token_id=ids.get(special_tokens.get("bos_token", "")),
        generation_config_json=json.dumps(generation) if generation else "",
        sampling_sources=recommended.sources,
        pooled=None if pooling is None else pooling.asked,
    )


def _read_text(path: Path, key: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}{path} cannot be read: {error}; give a text file in UTF-8") from error


def _load_tokenizer(path: Path, files: TokenizerFiles) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:
        raise ConfigError(f"{tokenizer_file(path)}: not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for token_id, token in files.config.get("added_tokens_decoder", {}).items():
        if tokenizer.token_to_id(token["content"]) is None or tokenizer.id_to_token(int(token_id)) is None:
            raise ConfigError(
                f"{folder_of(path) / 'tokenizer_config.json'}: added_tokens_decoder.{token_id} does not "
                "continue the vocabulary of the tokenizer"
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
    legacy = (read_json(path / "chat_template.json") or {}).get("chat_template")
    if isinstance(legacy, str):
        templates[DEFAULT_TEMPLATE] = legacy
    if (path / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(path / "chat_template.jinja")
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _read_text(extra)
    return templates


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
