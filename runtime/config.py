"""Reads the one configuration file: TOML, one table per owner, overridden by environment variables.

`MILLRACE_ENGINE__MAX_NUM_SEQS=8` overrides `max_num_seqs` in `[engine]`; double underscores go one table
deeper. An unknown key is an error that names it. Owners (gateway, tokenizer_svc, engine, observability)
declare the type of their own table and decode it with `load_section`; none sees the others'.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from contract.engines import model_key
from contract.formats import ReasoningFormat, ToolCallFormat
from runtime.errors import ConfigError

_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
Section = TypeVar("Section", bound=msgspec.Struct)

# msgspec names an unknown field, but its path ends at the table that holds it.
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")

ENV_PREFIX = "MILLRACE_"
# The environment of this process; a reference, so later changes are seen.
ENVIRONMENT: Mapping[str, str] = os.environ

# Every table that some service owns. A table outside this set is a typing mistake.
SECTIONS = frozenset(
    {
        "model",
        "models",
        "routes",
        "shadows",
        "security",
        "health",
        "tokenizer",
        "engine",
        "gateway",
        "tiers",
        "tenants",
        "keys",
        "envoy",
        "observability",
        "supervisor",
    }
)

# Variables with the prefix that are not configuration keys.
_NOT_CONFIG = frozenset(
    {
        "MILLRACE_DEV_KEY",
        "MILLRACE_API_KEY",
        "MILLRACE_CACHE_DIR",
        "MILLRACE_PACKAGE_INDEX",
        "MILLRACE_STATE_DIR",
        "MILLRACE_URL",
        "MILLRACE_QUANTIZE_HOME",
        "MILLRACE_VLLM_HOME",
    }
)

# Tables that may change while services run, and the variable that names a JSON file which has them instead of
# the configuration file: a supervisor writes it, checkpoints resolved.
LIVE_SECTIONS = ("models", "routes", "shadows")
MODELS_FILE_VARIABLE = "MILLRACE_MODELS_FILE"


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model.adapters.<name>]`, or of `[models.<name>]`: a LoRA adapter, asked for as `model:adapter`."""

    # Directory in PEFT's form.
    path: str
    # Tenants that may ask for the adapter; empty: all that may ask for the model.
    tenants: tuple[str, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model]`, or one of `[models.<name>]`: which checkpoint is served, and under which name. Shared by all
    services.
    """

    # Directory in Hugging Face format, or a hub id.
    path: str = "models/millrace-nano"
    # Name that clients ask for; the last part of the path when empty.
    name: str = ""
    # Other names that clients may ask for.
    aliases: tuple[str, ...] = ()
    # File with a Jinja template that replaces the checkpoint's own.
    chat_template: str = ""
    # How the model writes calls of tools, and reasoning; empty: found by its chat template.
    tool_call_parser: Literal["", ToolCallFormat] = ""
    reasoning_parser: Literal["", ReasoningFormat] = ""
    # Version of all this, as engines announce it and metrics say; a checkpoint that is replaced needs another
    # one. The part behind "@" in the name when empty.
    revision: str = ""
    # Engine processes that `millrace up` starts for it, and their pool; 0 and "" leave it to [supervisor] and
    # [engine].
    engines: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    pool: str = ""
    # "on demand": `millrace up` starts its engines when somebody asks for it, and ends them when nobody has
    # for idle_unload_s (0 is never), or when another model needs the memory (supervisor.on_demand_bytes). So
    # many requests wait at each gateway while it is loaded; further ones are refused with a retry delay.
    load: Literal["at start", "on demand"] = "at start"
    idle_unload_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    load_queue: Annotated[int, msgspec.Meta(ge=1)] = 64
    # Prompt plus completion; 0 is the engines' own limit.
    max_context_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Sampling options instead of those that the checkpoint recommends, such as {temperature = 0.7}.
    defaults: dict[str, Any] = {}
    # Prices of the model's tokens, with the keys of [gateway.prices.<model>], which they override.
    prices: dict[str, Any] = {}
    # Tenants and tiers that may use it; empty: all.
    tenants: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    adapters: dict[str, AdapterConfig] = {}

    @property
    def served_name(self) -> str:
        """Name under which the model is listed."""
        return self.name or Path(self.path).name

    @property
    def is_on_demand(self) -> bool:
        """Whether it is loaded when somebody asks for it."""
        return self.load == "on demand"

    @property
    def served_revision(self) -> str:
        """Version that engines announce; "" where versions are not distinguished."""
        return self.revision or self.served_name.partition("@")[2]

    @property
    def key(self) -> str:
        """See `contract.engines.model_key`."""
        return model_key(self.served_name, self.served_revision)

    @property
    def names(self) -> frozenset[str]:
        """What clients may ask for: the name, with the revision or without, and the aliases."""
        return frozenset((self.served_name, self.key, *self.aliases))


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[security]`: what services trust each other by: a secret that signs contexts, and certificates."""

    # Shared by all services of one deployment; at least 16 characters. `context_secret_file` wins.
    context_secret: str = ""
    context_secret_file: str = ""
    # Contexts older than this are refused.
    max_context_age_s: float = 3600.0
    # PEM files with which services prove themselves to each other; all three, or none for plain connections.
    tls_certificate: str = ""
    tls_key: str = ""
    # Authority that signed every service's certificate, and nothing else.
    tls_authority: str = ""
    # Name in every service's certificate.
    tls_name: str = "millrace.internal"

    def secret(self) -> bytes:
        """The signing secret; raises ConfigError when none, or too short a one, is configured."""
        text = self.context_secret
        if self.context_secret_file:
            try:
                text = Path(self.context_secret_file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ConfigError(f"security.context_secret_file: {error}") from error
        if len(text) < 16:
            raise ConfigError(
                "security.context_secret: at least 16 characters are needed to sign request contexts; "
                "set it, or MILLRACE_SECURITY__CONTEXT_SECRET, to the same value for every service"
            )
        return text.encode()


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[health]`: when a process that does not end counts as dead. Shared by all services."""

    # Services say something to one another several times in this many seconds, in the middle of long work
    # too. One that does not counts as dead: its streams go on elsewhere, and its parent replaces it.
    silence_limit_s: Annotated[float, msgspec.Meta(ge=0.5)] = 4.0
    # Longest step of an engine: a core that computes may be silent for so long.
    step_limit_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0

    @property
    def beat_s(self) -> float:
        """How often something is said where there is nothing to say, in seconds."""
        return self.silence_limit_s / 4


def read_tables(path: Path | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """All tables of the file with the environment's overrides applied.

    Values from the environment are parsed as TOML values where they are such, and taken as text otherwise.
    Raises ConfigError for an unreadable file, for unknown tables, and for one model beside several.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration file: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid TOML in UTF-8: {error}") from error
    for name in tables:
        if name not in SECTIONS:
            raise ConfigError(f"{path}: unknown table [{name}]; known: {', '.join(sorted(SECTIONS))}")
    if tables.get("models") and "path" in tables.get("model", {}):
        raise ConfigError(
            f"{path}: [model] and [models.<name>] exclude each other; make the first one of them"
        )
    if environ.get(MODELS_FILE_VARIABLE):
        tables = {**without_models(tables), **_read_models(Path(environ[MODELS_FILE_VARIABLE]))}
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX) and variable not in (*_NOT_CONFIG, MODELS_FILE_VARIABLE):
            _override(tables, variable, text)
    return tables


def without_models(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that say nothing of what is served."""
    return {name: table for name, table in tables.items() if name not in ("model", *LIVE_SECTIONS)}


def _read_models(path: Path) -> dict[str, Any]:
    try:
        return dict(msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]]))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{MODELS_FILE_VARIABLE}: {path} cannot be read: {error}") from error


def _override(tables: dict[str, Any], variable: str, text: str) -> None:
    *parents, leaf = variable.removeprefix(ENV_PREFIX).lower().split("__")
    if not parents or parents[0] not in SECTIONS:
        raise ConfigError(
            f"{variable}: not a configuration variable; expected {ENV_PREFIX}<TABLE>__<KEY> with one of "
            f"{', '.join(sorted(SECTIONS))}"
        )
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{variable}: {parent} is not a table")
    table[leaf] = _parse_value(text)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def load_section(tables: Mapping[str, Any], name: str, kind: type[Section]) -> Section:
    """Decodes the table `name`; raises ConfigError naming the key that is unknown or of the wrong type."""
    return decode_table(name, tables.get(name, {}), kind)


def problem_with_adapter_name(name: str) -> str:
    """Why an adapter cannot have a name; empty where it can."""
    if _ADAPTER_NAME.fullmatch(name):
        return ""
    return f"{name[:80]!r} is no name of an adapter: letters, digits, '.', '_' and '-', at most 64 of them"


def decode_table(name: str, table: Any, kind: type[Section]) -> Section:
    """Decodes the table called `name`, for example "tiers.batch"; errors as of `load_section`."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        said = str(error)
        problem, _, path = said.partition(" - at `$")
        key = name + path.removesuffix("`")
        unknown = _UNKNOWN_FIELD.search(problem)
        choices = _choices(kind, path.removesuffix("`"))
        raise ConfigError(
            f"{key}{f'.{unknown[1]}' if unknown else ''}: {problem}"
            f"{f'; expected one of {choices}' if choices else ''}"
        ) from error


def _choices(kind: type, path: str) -> str:
    """The values of the field at `path` (".cache.kv_dtype") that has fixed ones; empty for other fields."""
    found: Any = msgspec.inspect.type_info(kind)
    # A value of a table, whose key is not told, is "[...]"; one of a list "[0]".
    for key in re.sub(r"\[(\.\.\.|\d+)\]", ".*", path).split(".")[1:]:
        fields = {field.encode_name: field.type for field in getattr(found, "fields", ())}
        inner = getattr(found, "value_type", getattr(found, "item_type", None))
        found = inner if key == "*" else fields.get(key)
    if not isinstance(found, msgspec.inspect.LiteralType):
        return ""
    return ", ".join(str(value) for value in found.values if value != "")
