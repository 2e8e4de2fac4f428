"""Typed access to `config.json`, in its older and newer forms, with errors that name the key."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model.spec import ROPE_KINDS, CheckpointError, RopeSpec

# Beyond any model's heads and widths, and beyond its layers, which are listed one by one; more is a damaged
# file.
LARGEST_COUNT = 1 << 31
_LARGEST = {"num_hidden_layers": 1 << 14}
MAX_FLOAT = sys.float_info.max
# Numbers of a rotation that older configurations have beside its other parameters.
_RENAMED = {"su": "longrope", "mrope": "default"}
_BESIDE = ("rope_theta", "partial_rotary_factor")


class ConfigReader:
    """Reads keys of one `config.json`. A wrong type or a missing key raises CheckpointError naming it."""

    def __init__(self, values: Mapping[str, Any], source: str, *, is_whole: bool = False) -> None:
        self.values = values
        self.source = source
        # Whether what is absent holds nowhere, as in metadata of GGUF files.
        self.is_whole = is_whole

    @classmethod
    def of(cls, folder: Path) -> ConfigReader:
        """Opens `config.json` in a checkpoint's folder."""
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing: {folder} is not a Hugging Face checkpoint") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds no table of keys, but {str(values)[:50]!r}")
        return cls(values, str(path))

    def aliased(self, **names: str) -> ConfigReader:
        """The same with keys that a family calls by other names: ours to its own."""
        given = {key: self.values[own] for key, own in names.items() if own in self.values}
        return self.having({**self.values, **given})

    def having(self, values: Mapping[str, Any]) -> ConfigReader:
        """Other values from the same place."""
        return ConfigReader(values, self.source, is_whole=self.is_whole)

    def completed(self, **defaults: Any) -> ConfigReader:
        """The same with what a family's configuration means where it leaves keys out; null is a value."""
        return self if self.is_whole else self.having({**defaults, **self.values})

    def turned(self, rotation: Mapping[str, Any]) -> ConfigReader:
        """The same with what a family's configuration means where it states no rotation."""
        if self.is_whole or self.values.get("rope_parameters") or self.values.get("rope_scaling"):
            return self
        return self.having({**self.values, "rope_parameters": rotation})

    def without(self, *keys: str) -> ConfigReader:
        """The same as if those keys were absent."""
        kept = {key: value for key, value in self.values.items() if key not in keys}
        return self.having(kept)

    def turning_whole(self) -> ConfigReader:
        """The same without a share of heads that turns, where a share says nothing of what is turned."""
        given = {key: self.table(key) for key in ("rope_parameters", "rope_scaling") if self.values.get(key)}
        for rotation in given.values():
            rotation.pop("partial_rotary_factor", None)
        return self.having({**self.values, **given}).without("partial_rotary_factor")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; null counts as absent."""
        value: int = self._typed(key, default, int, "a whole number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of something that a model has at least one of."""
        value, largest = self.integer(key, default), _LARGEST.get(key, LARGEST_COUNT)
        if not 1 <= value <= largest:
            raise CheckpointError(f"{self.source}: {key} = {value} is not a number from 1 to {largest}")
        return value

    def integer_of(self, *keys: str) -> int:
        """A whole number that goes by one of several names; the first that is there counts."""
        return self.integer(next((key for key in keys if self.values.get(key) is not None), keys[0]))

    def optional_integer(self, key: str) -> int | None:
        """A whole number, or None when absent or null."""
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; null counts as absent."""
        value = self._typed(key, default, int | float, "a number")
        # JSON as Python reads it has infinities, and numbers that are no number.
        if not -MAX_FLOAT <= value <= MAX_FLOAT:
            raise CheckpointError(f"{self.source}: {key} = {value!r} is not a finite number")
        return float(value)

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

    def numbers(self, key: str, count: int) -> tuple[int, ...] | None:
        """Whole numbers, one per layer, or None when absent, null or empty."""
        values = self.values.get(key)
        if values is None or values == []:
            return None
        if not isinstance(values, list) or len(values) < count or {type(value) for value in values} != {int}:
            raise CheckpointError(f"{self.source}: {key} must list numbers of {count} layers, got {values!r}")
        return tuple(values[:count])

    def numbers_of(self, key: str) -> tuple[int, ...] | None:
        """Whole numbers, however many, or None when absent or null."""
        values = self.values.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise CheckpointError(f"{self.source}: {key} = {values!r} is not a list of whole numbers")
        return tuple(values)

    def require_multiple(self, name: str, value: int, key: str, of: int) -> None:
        """Refuses a number that another one does not divide."""
        if value % of:
            raise CheckpointError(f"{self.source}: {name} = {value} is not a multiple of {key} = {of}")

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

    def rope(
        self,
        rotary_dim: int,
        *,
        layer_type: str = "",
        default_theta: float = 10_000.0,
        default_partial: float | None = None,
    ) -> RopeSpec:
        """The rotation of one kind of layer, from `rope_parameters` (flat, or nested by layer type) or from
        `rope_theta` and `rope_scaling`. `rotary_dim` is before a `partial_rotary_factor`, which a family
        without a default does not have, since transformers turns its heads whole then and others do not.
        Raises CheckpointError naming both keys where they contradict each other.
        """
        defaults = (default_theta, default_partial)
        found = {}
        for key in ("rope_parameters", "rope_scaling"):
            given = self.table(key)
            is_nested = bool(layer_type) and isinstance(given.get(layer_type), Mapping)
            if given:
                given = dict(given[layer_type]) if is_nested else given
                found[key] = self._rotation(key, given, rotary_dim, defaults, is_nested=is_nested)
        if not found:
            return self._rotation("rope_scaling", {}, rotary_dim, defaults, is_nested=False)
        first, *others = found.values()
        for other in others:
            self._refuse_difference(first, other)
        return first

    def table(self, key: str) -> dict[str, Any]:
        """A table of keys; empty when absent or null."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.source}: {key} = {value!r} is not a table of keys")
        return dict(value)

    def _rotation(
        self,
        key: str,
        given: dict[str, Any],
        rotary_dim: int,
        defaults: tuple[float, float | None],
        *,
        is_nested: bool,
    ) -> RopeSpec:
        """What one key says of the rotation, with what stands beside it."""
        # What is null counts as absent, but not to transformers' one switch that is on by default.
        parameters = {name: value for name, value in given.items() if value is not None or name == "truncate"}
        names = [parameters.pop(name) for name in ("rope_type", "type") if name in parameters]
        # The name that the first Phi-3 checkpoints have for it.
        # Of text alone the three positions of "mrope" are one.
        kinds = [_RENAMED.get(str(name), name) for name in names] or ["default"]
        if len(set(map(str, kinds))) > 1:
            raise CheckpointError(
                f"{self.source}: {key}.rope_type = {names[0]!r} and {key}.type = {names[1]!r} contradict "
                "each other; leave one out"
            )
        if kinds[0] not in ROPE_KINDS:
            known = ", ".join(ROPE_KINDS)
            raise CheckpointError(
                f"{self.source}: {key}: rope_type {kinds[0]!r} is not supported, only {known}"
            )
        theta, partial = (self._agreed(key, name, given, is_nested=is_nested) for name in _BESIDE)
        if partial is not None and not 0 < partial <= 1:
            raise CheckpointError(
                f"{self.source}: partial_rotary_factor = {partial!r} is no share of a head that is rotated"
            )
        parameters = {name: value for name, value in parameters.items() if name not in _BESIDE}
        # Phi-3 keeps the original length beside the scaling, and there it has priority.
        original = self.values.get("original_max_position_embeddings")
        inside = parameters.get("original_max_position_embeddings", original)
        if original is not None:
            if inside != original:
                name = "original_max_position_embeddings"
                raise CheckpointError(
                    f"{self.source}: {key}.{name} = {inside!r} and {name} = {original!r} contradict each "
                    "other; leave one out"
                )
            parameters["original_max_position_embeddings"] = original
        share = (defaults[1] or 1.0) if partial is None else partial
        if share < 1 and defaults[1] is None and kinds[0] != "proportional" and not self.is_whole:
            raise CheckpointError(
                f"{self.source}: partial_rotary_factor = {share!r} is not supported, as this architecture "
                "turns whole heads; leave it out if the model was trained so"
            )
        if kinds[0] == "proportional":
            # Of all pairs of the head some stand still.
            parameters["turning_share"], share = share, 1.0
        return RopeSpec(
            kind=kinds[0],
            theta=float(defaults[0] if theta is None else theta),
            rotary_dim=int(rotary_dim * share),
            max_positions=self.count("max_position_embeddings"),
            parameters=parameters,
        )

    def _agreed(self, key: str, name: str, given: Mapping[str, Any], *, is_nested: bool) -> float | None:
        """A number that stands inside of `key`, beside it, or in both places. Of one kind of layer alone what
        stands beside says nothing.
        """
        inside = ConfigReader(given, f"{self.source}: {key}").optional_number(name)
        beside = self.optional_number(name)
        if inside is not None and beside is not None and inside != beside and not is_nested:
            raise CheckpointError(
                f"{self.source}: {key}.{name} = {inside!r} and {name} = {beside!r} contradict each other; "
                "leave one out"
            )
        return beside if inside is None else inside

    def _refuse_difference(self, newer: RopeSpec, older: RopeSpec) -> None:
        if newer == older:
            return
        first, second = (
            {"rope_type": rope.kind, "rope_theta": rope.theta, "partial": rope.rotary_dim, **rope.parameters}
            for rope in (newer, older)
        )
        name = next(name for name in {**first, **second} if first.get(name) != second.get(name))
        raise CheckpointError(
            f"{self.source}: rope_parameters.{name} = {first.get(name)!r} and rope_scaling.{name} = "
            f"{second.get(name)!r} contradict each other; leave one of the two keys out"
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
