"""Typed access to `config.json`, in its older and newer forms, with errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model.spec import CheckpointError, RopeSpec

# Beyond any model's layers, heads and widths; more is a damaged file.
LARGEST_COUNT = 1 << 31


class ConfigReader:
    """Reads keys of one `config.json`. A wrong type or a missing key raises CheckpointError naming it."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def of(cls, folder: Path) -> ConfigReader:
        """Opens `config.json` in a checkpoint's folder."""
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing: {folder} is not a Hugging Face checkpoint") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds no table of keys, but {str(values)[:50]!r}")
        return cls(values, str(path))

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; null counts as absent."""
        value: int = self._typed(key, default, int, "a whole number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of something that a model has at least one of."""
        value = self.integer(key, default)
        if not 1 <= value <= LARGEST_COUNT:
            raise CheckpointError(f"{self.source}: {key} = {value} is not a number from 1 to {LARGEST_COUNT}")
        return value

    def integer_of(self, *keys: str) -> int:
        """A whole number that goes by one of several names; the first that is there counts."""
        return self.integer(next((key for key in keys if self.values.get(key) is not None), keys[0]))

    def optional_integer(self, key: str) -> int | None:
        """A whole number, or None when absent or null."""
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; null counts as absent."""
        return float(self._typed(key, default, int | float, "a number"))

    def optional_number(self, key: str) -> float | None:
        """A number, or None when absent or null."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; null counts as absent."""
        value: bool = self._typed(key, default, bool, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; null counts as absent."""
        value: str = self._typed(key, default, str, "a string")
        return value

    def require(self, key: str, expected: object, default: object) -> None:
        """Refuses a checkpoint that sets `key` to something this engine does not compute."""
        value = self.values.get(key)
        if (value is not None and value != expected) or (value is None and default != expected):
            raise CheckpointError(f"{self.source}: {key} = {value!r} is not supported, only {expected!r}")

    def layer_types(self, num_layers: int) -> tuple[str, ...] | None:
        """`layer_types`, one name per layer, or None when absent."""
        types = self.values.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != num_layers:
            raise CheckpointError(f"{self.source}: layer_types must list {num_layers} layers, got {types!r}")
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise CheckpointError(
                f"{self.source}: layer_types holds {sorted(unknown)}, which is not supported"
            )
        return tuple(types)

    def rope(self, rotary_dim: int, *, layer_type: str = "", default_theta: float = 10_000.0) -> RopeSpec:
        """The rotation of one kind of layer, from `rope_parameters` (flat, or nested by layer type) or from
        `rope_theta` and `rope_scaling`. `rotary_dim` is before a `partial_rotary_factor`.
        """
        given = self.values.get("rope_parameters") or {}
        if layer_type and isinstance(given.get(layer_type), Mapping):
            given = given[layer_type]
        parameters = dict(self.values.get("rope_scaling") or {}) | dict(given)
        theta = parameters.pop("rope_theta", None) or self.number("rope_theta", default_theta)
        older = parameters.pop("type", None)
        kind = parameters.pop("rope_type", None) or older or "default"
        # The name that the first Phi-3 checkpoints have for it.
        kind = "longrope" if kind == "su" else kind
        partial = parameters.pop("partial_rotary_factor", None) or self.number("partial_rotary_factor", 1.0)
        # Phi-3 keeps the original length beside the scaling, and there it has priority.
        original = self.values.get("original_max_position_embeddings")
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        return RopeSpec(
            kind=kind,
            theta=float(theta),
            rotary_dim=int(rotary_dim * partial),
            max_positions=self.integer("max_position_embeddings"),
            parameters=parameters,
        )

    def _typed(self, key: str, default: object, kind: Any, noun: str) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: {key} is missing")
        # Truth values are whole numbers to Python.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{self.source}: {key} = {value!r} is not {noun}")
        return value
