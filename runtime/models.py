"""The models of a deployment, the aliases that stand for several, and the file that says so while it changes.

`[models.<name>]` are served side by side; `[model]` is the same for one. `[routes]` gives an alias weights of
models; `[shadows.<name>]` sends copies of what is asked under a name to another model.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from runtime.config import (
    ENVIRONMENT,
    MODELS_FILE_VARIABLE,
    ModelConfig,
    decode_table,
    load_section,
    problem_with_adapter_name,
    read_tables,
)
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)

# Between a model's name and an adapter's, as clients ask for both.
ADAPTER_SEPARATOR = ":"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}")
# How often the file is looked at, and for how long it must not change before it is believed, in seconds.
_INTERVAL_S = 0.5
_SETTLED_S = 0.05

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ShadowConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[shadows.<name>]`: copies of what is asked under a name (a model's or an alias's) go to `model`."""

    model: str
    # Share of the requests that are copied.
    share: Share = 1.0
    # Copies at a time in each gateway; what would be more is dropped.
    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] = 4
    # A copy that takes longer is ended.
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, checked as a whole."""

    # By name, in the order of the file.
    models: dict[str, ModelConfig]
    # Weights of models by alias.
    routes: dict[str, dict[str, float]] = {}
    shadows: dict[str, ShadowConfig] = {}


def load_models(tables: Mapping[str, Any]) -> Models:
    """Decodes and checks `[models]`, or `[model]` where there are none, `[routes]` and `[shadows]`.

    Raises ConfigError naming the key, what is wrong with it and the remedy.
    """
    models = dict(_models(tables))
    routes = {name: _route(name, table, models) for name, table in _named(tables, "routes")}
    shadows = {
        name: decode_table(f"shadows.{name}", table, ShadowConfig)
        for name, table in _named(tables, "shadows")
    }
    found = Models(models=models, routes=routes, shadows=shadows)
    _check_names(found)
    for name, shadow in shadows.items():
        if shadow.model not in models:
            _unknown(f"shadows.{name}.model", shadow.model, models)
        if name not in routes and all(name not in model.names for model in models.values()):
            _unknown(f"shadows.{name}", name, {**models, **routes})
    return found


def own_model(tables: Mapping[str, Any]) -> ModelConfig:
    """The one model of a process that serves one: `[model]`, or that of `[models]` with its name."""
    alone = load_section(tables, "model", ModelConfig)
    if "path" in tables.get("model", {}) or not tables.get("models"):
        return alone
    models = dict(_models(tables))
    if alone.name not in models:
        _unknown("model.name", alone.name, models)
    return models[alone.name]


def replaced(old: Models, new: Models) -> str:
    """What keeps `new` from replacing `old` while services run; "" for nothing.

    Engines of two checkpoints under one name and revision could not be distinguished.
    """
    for name, model in new.models.items():
        before = old.models.get(name)
        if before is not None and before.key == model.key and _made_of(before) != _made_of(model):
            return (
                f"models.{name}.revision: the checkpoint, template or parsers changed and it did not; give "
                "it another revision, or the model another name"
            )
    return ""


def _made_of(model: ModelConfig) -> tuple[str, ...]:
    return (model.path, model.chat_template, model.tool_call_parser, model.reasoning_parser)


def _models(tables: Mapping[str, Any]) -> Iterator[tuple[str, ModelConfig]]:
    several = list(_named(tables, "models"))
    if not several:
        model = load_section(tables, "model", ModelConfig)
        yield model.served_name, model
        return
    for name, table in several:
        key = f"models.{name}"
        if not _MODEL_NAME.fullmatch(name):
            raise ConfigError(
                f"{key}: {name!r} is not a name; use 1 to 128 of letters, digits and '._/@-', beginning with "
                "a letter or digit"
            )
        if isinstance(table, Mapping) and "name" in table:
            raise ConfigError(f"{key}.name: the table's own name is the model's; leave it out")
        if isinstance(table, Mapping) and "path" not in table:
            raise ConfigError(f"{key}.path: it is missing; name a checkpoint")
        model = decode_table(key, table, ModelConfig)
        for adapter in model.adapters:
            if problem := problem_with_adapter_name(adapter):
                raise ConfigError(f"{key}.adapters: {problem}")
        yield name, msgspec.structs.replace(model, name=name)


def _named(tables: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    found = tables.get(section, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"[{section}]: expected one entry per name")
    yield from found.items()


def _route(alias: str, table: Any, models: Mapping[str, ModelConfig]) -> dict[str, float]:
    weights = decode_table(f"routes.{alias}", {"weights": table}, _Weights).weights
    for name, weight in weights.items():
        if name not in models:
            _unknown(f"routes.{alias}.{name}", name, models)
        if weight < 0:
            raise ConfigError(
                f"routes.{alias}.{name}: {weight:g} is less than 0; give a share of the requests"
            )
    if not sum(weights.values()):
        raise ConfigError(f"routes.{alias}: its weights sum to 0; give at least one model a weight above 0")
    return weights


class _Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weights: dict[str, float]


def _check_names(found: Models) -> None:
    owners: dict[str, str] = {}
    claims = [(each, f"models.{name}") for name, model in found.models.items() for each in model.names]
    claims += [(alias, f"routes.{alias}") for alias in found.routes]
    for name, owner in claims:
        if owners.setdefault(name, owner) != owner:
            raise ConfigError(
                f"{owner}: {owners[name]} is called {name!r}, too; every name stands for one thing"
            )


def _unknown(key: str, name: str, known: Mapping[str, Any]) -> NoReturn:
    raise ConfigError(f"{key}: there is no model {name!r}; known: {', '.join(known) or 'none'}")


class Source:
    """The file that says what is served: the configuration file, or the one that a supervisor writes."""

    def __init__(self, config: Path | None, environ: Mapping[str, str] = ENVIRONMENT) -> None:
        self._config = config
        self._environ = environ
        written = environ.get(MODELS_FILE_VARIABLE)
        self._path = Path(written) if written else config
        # Hash of the file as it was read first, in hexadecimal; "" where there is no file.
        self.sha256 = ""

    def read(self) -> dict[str, Any]:
        """All tables; see `read_tables`."""
        tables = read_tables(self._config, self._environ)
        if self._config is not None and not self.sha256:
            self.sha256 = sha256_of(self._config)
        return tables

    async def follow(self, apply: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Has `apply` called with all tables whenever the file has changed, until cancelled.

        A file that cannot be used, and a ConfigError of `apply`, changes nothing and is logged.
        """
        seen = self._mark()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            mark = self._mark()
            if mark in (seen, None):
                continue
            await asyncio.sleep(_SETTLED_S)
            if self._mark() != mark:
                # It is being written.
                continue
            seen = mark
            try:
                await apply(self.read())
            except ConfigError as error:
                _log.error("what is served stays as it was: %s", error)

    def _mark(self) -> tuple[int, ...] | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        # A mounted ConfigMap is exchanged as a whole, whatever its times say.
        return found.st_mtime_ns, found.st_size, found.st_ino


def sha256_of(config: Path) -> str:
    """The hash that identifies a configuration file, in hexadecimal."""
    return hashlib.sha256(config.read_bytes()).hexdigest()


# The source of this process's tables; a list, so that `use` can replace it.
_current = [Source(None, {})]


def use(source: Source) -> Source:
    """Sets where this process's tables come from; to be called once, at start."""
    _current[0] = source
    return source


def source() -> Source:
    """Where this process's tables come from; nothing where nobody has said so."""
    return _current[0]
