"""`[tokenizer]`: where the service listens and what one request may cost it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.config import HealthConfig, SecurityConfig, load_section
from runtime.errors import ConfigError
from runtime.models import Models, load_models

# Checkpoint whose tokenizer stands in when none is at hand.
BUNDLED_CHECKPOINT = Path(__file__).resolve().parent.parent / "models" / "millrace-nano"


class PromptLimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tokenizer.limits]`: the largest inputs that are looked at; beyond them a request is refused."""

    # Text of a prompt, or of all strings of a conversation together. A million tokens are 4 to 6 MB of text.
    max_prompt_bytes: int = 8 * 1024 * 1024
    max_messages: int = 4096
    # Texts of one ValidateOutput.
    max_batch_texts: int = 8192
    max_tools: int = 256
    # Bytes of the text that the chat template writes.
    max_rendered_bytes: int = 32 * 1024 * 1024
    # Time that the chat template may take.
    max_render_s: float = 5.0
    # Time from a request's arrival to its answer, grammar included. Below what gateways wait.
    max_prepare_s: float = 20.0
    # Tokens of a prompt; 0 leaves it to what the gateway says of the engine's limit.
    max_prompt_tokens: int = 0
    # Schema, regular expression, grammar or list of choices.
    max_grammar_bytes: int = 1024 * 1024
    # Nesting of a JSON schema.
    max_schema_depth: int = 128
    # Serialized artifact that the engine is handed.
    max_artifact_bytes: int = 8 * 1024 * 1024


class CompileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tokenizer.compile]`: processes that compile grammars, and their budgets."""

    workers: int = 4
    # A compilation that takes more processor time is killed and refused.
    time_limit_s: float = 2.0
    # Address space that one compilation may add to its worker.
    memory_limit_bytes: int = 512 * 1024 * 1024
    # Compilations that may wait, over all tenants and for one tenant.
    max_queued: int = 1024
    max_queued_per_tenant: int = 64
    # Artifacts kept for reuse, in bytes of payload.
    cache_bytes: int = 256 * 1024 * 1024
    # Compile a grammar once for all tenants: the time of a request then tells whether another has used it.
    shared: bool = False


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tokenizer]`."""

    listen: str = "127.0.0.1:50061"
    # Address of the Prometheus endpoint; none when empty.
    metrics_listen: str = ""
    # Longest time that calls in flight may take after SIGTERM.
    drain_limit_s: float = 10.0
    # Answer Prepare without a signed request context (for use without a gateway).
    allow_unsigned: bool = False
    # Use the bundled checkpoint's tokenizer when `model.path` has none; the engine needs no weights then.
    simulated: bool = False
    # Encodings of conversation turns kept for reuse, in tokens.
    turn_cache_tokens: int = 4 * 1024 * 1024
    limits: PromptLimitsConfig = PromptLimitsConfig()
    compile: CompileConfig = CompileConfig()


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All tables that this service reads."""

    tokenizer: TokenizerConfig
    models: Models
    security: SecurityConfig
    health: HealthConfig


def load(tables: Mapping[str, Any]) -> ServiceConfig:
    """Decodes the service's tables; raises ConfigError naming the key at fault."""
    config = ServiceConfig(
        tokenizer=load_section(tables, "tokenizer", TokenizerConfig),
        models=load_models(tables),
        security=load_section(tables, "security", SecurityConfig),
        health=load_section(tables, "health", HealthConfig),
    )
    for name, model in config.models.models.items():
        template, key = model.chat_template, f"models.{name}" if tables.get("models") else "model"
        if template and not Path(template).is_file():
            raise ConfigError(f"{key}.chat_template: {template} is no file; give that of a Jinja template")
    compile_config = config.tokenizer.compile
    if compile_config.workers < 1:
        raise ConfigError("tokenizer.compile.workers: at least 1 process is needed to compile grammars")
    if compile_config.time_limit_s <= 0:
        raise ConfigError("tokenizer.compile.time_limit_s: must be greater than 0 seconds")
    return config
