"""Which models a stack serves, as the command line and the configuration say; and the files that tell its
processes, which are written anew while they run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from checkpoint.files import expanded, told_name
from runtime.config import LIVE_SECTIONS, ModelConfig, load_section
from runtime.errors import ConfigError
from runtime.models import Models, load_models
from services.supervisor import checkpoint
from services.supervisor.config import Options

# In the state directory: what is served, and the addresses of the engines.
MODELS_FILE = "models.json"
ENGINES_FILE = "engines"
# What stands there while none runs: an empty file would be one that is being written.
NO_ENGINES = "# no engine runs now"
# Options that speak of one model.
_OF_ONE = ("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser")


def resolve_models(options: Options, tables: Mapping[str, Any], environ: Mapping[str, str]) -> Models:
    """All models, their checkpoints found or downloaded; raises ConfigError."""
    asked = options.model or ()
    if not asked and tables.get("models"):
        _refuse_options(options, "[models.<name>] says it for each")
        found = load_models(tables)
    elif len(asked) > 1 or (asked and _named(asked[0])[0]):
        _refuse_options(options, "with several models name each as --model NAME=PATH")
        found = load_models({**tables, "models": _several(asked)})
    else:
        one = _one(options, load_section(tables, "model", ModelConfig), environ)
        # Its template, parsers and adapters are checked with every other table.
        plain = {"model": {"path": one.path, "name": one.name, "aliases": list(one.aliases)}}
        rest = {name: tables.get(name, {}) for name in ("routes", "shadows")}
        return msgspec.structs.replace(load_models({**plain, **rest}), models={one.name: one})
    weights = not options.simulated
    return msgspec.structs.replace(
        found,
        models={
            name: msgspec.structs.replace(each, path=str(checkpoint.resolve(each.path, weights=weights)))
            for name, each in found.models.items()
        },
    )


def _one(options: Options, section: ModelConfig, environ: Mapping[str, str]) -> ModelConfig:
    asked = (options.model or (section.path,))[0]
    path = checkpoint.resolve(asked, weights=not options.simulated)

    def of_model(key: str, said: object, configured: str) -> str:
        # The file speaks of its own checkpoint.
        is_of_another = options.model and f"MILLRACE_MODEL__{key.upper()}" not in environ
        return str(said or ("" if is_of_another else configured))

    texts = {
        key: of_model(key, getattr(options, key), getattr(section, key))
        for key in ("chat_template", "tool_call_parser", "reasoning_parser")
    }
    name = of_model("name", options.served_model_name, section.name)
    # A download's directory is named by a revision, which says nothing to people.
    name = name or told_name(asked, path)
    own: Any = {**texts, "path": str(path), "name": name}
    return msgspec.structs.replace(section, **own)


def _named(asked: str) -> tuple[str, str]:
    """NAME and PATH of NAME=PATH; ("", asked) of a path."""
    name, separator, path = asked.partition("=")
    if not separator or Path(asked).exists():
        return "", asked
    return name, path


def _several(asked: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in asked:
        name, path = _named(each)
        name = name or told_name(path, expanded(path).resolve())
        if name in found:
            raise ConfigError(
                f"--model {each}: there is a model {name!r} already; give them names as --model NAME=PATH"
            )
        found[name] = {"path": path}
    return found


def _refuse_options(options: Options, remedy: str) -> None:
    for name in _OF_ONE:
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: it speaks of one model; {remedy}")


def _written(model: ModelConfig) -> dict[str, Any]:
    """What of a model is not the default."""
    plain: dict[str, Any] = msgspec.to_builtins(model)
    usual = msgspec.to_builtins(ModelConfig())
    return {key: value for key, value in plain.items() if value != usual[key] or key == "path"}


def environment_of(model: ModelConfig) -> dict[str, object]:
    """Settings of a process that serves this model alone."""
    return {f"model.{key}": value for key, value in {"name": "", **_written(model)}.items()}


def served_tables(models: Models, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that the stack's processes read of what is served."""
    plain = {name: _written(model) for name, model in models.models.items()}
    found: dict[str, Any] = {name: tables.get(name, {}) for name in LIVE_SECTIONS if name != "models"}
    if len(plain) == 1 and not tables.get("models"):
        return {**found, "model": next(iter(plain.values()))}
    for each in plain.values():
        each.pop("name", None)
    return {**found, "models": plain}


def write_models(state: Path, models: Models, tables: Mapping[str, Any]) -> Path:
    """Writes what is served for the stack's processes; readers see the old file or the new one."""
    return _replace(state / MODELS_FILE, json.dumps(served_tables(models, tables)))


def write_engines(state: Path, addresses: Sequence[str]) -> Path:
    """Writes where the engines are, for gateways."""
    text = "".join(f"{each}\n" for each in addresses)
    return _replace(state / ENGINES_FILE, text or f"{NO_ENGINES}\n")


def _replace(path: Path, text: str) -> Path:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
    return path
