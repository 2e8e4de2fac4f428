"""Fields of an API that are not served: how a face declares them, refuses them by name, or warns of them.

A field that is not declared at all is refused as unknown; one that has no effect here is named in a warning
header. Nothing is ignored in silence.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from contract.errors import unsupported
from gateway.http.body import decode

# Response header that lists fields without effect.
WARNING_HEADER = "x-millrace-warning"

_NULL = (b"", b"null")
_anything = msgspec.json.Decoder()
Body = TypeVar("Body", bound=msgspec.Struct)


def in_header(text: str) -> str:
    """A client's own words in a header: what could end it, and what is not ASCII, is an escape."""
    return text.encode("unicode_escape").decode()


class Unserved:
    """The fields of one API that it does not serve."""

    def __init__(
        self,
        *,
        refused: Mapping[str, str],
        harmless: Mapping[str, tuple[Any, ...]],
        without_effect: Mapping[str, str],
        remedies: Mapping[str, str] = {},
    ) -> None:
        """`refused` and `remedies` say what to do instead, `without_effect` why nothing happens; `harmless`
        are values that are accepted because they ask for what happens anyway.
        """
        self.harmless, self.without_effect = harmless, without_effect
        self._remedies = {**refused, **remedies}
        # They are declared, so that null, and values that change nothing, are accepted.
        self.names = tuple({**refused, **harmless, **without_effect})
        self._values = operator.attrgetter(*self.names)
        self._unset = (msgspec.Raw(),) * len(self.names)

    def declared_in(self, body: type[Body]) -> type[Body]:
        """The type of a body with the fields that are not served beside its own."""
        served = body.__struct_fields__
        declared = [(name, msgspec.Raw, msgspec.Raw()) for name in self.names if name not in served]
        made = msgspec.defstruct(
            body.__name__, declared, bases=(body,), frozen=True, kw_only=True, forbid_unknown_fields=True
        )
        return cast(type[Body], made)

    def check(self, body: msgspec.Struct) -> list[str]:
        """Warnings for fields without effect; raises UNSUPPORTED_FIELD for one that asks for what is not
        served.
        """
        values = self._values(body)
        if values == self._unset:
            return []
        warnings = []
        for name, value in zip(self.names, values, strict=True):
            # One endpoint may serve what another does not.
            raw = bytes(value) if isinstance(value, msgspec.Raw) else b""
            if raw in _NULL or self._changes_nothing(name, raw):
                continue
            if name in self.without_effect:
                warnings.append(f"{name} has no effect: {self.without_effect[name]}")
                continue
            raise unsupported(name, self.remedy(name))
        return warnings

    def remedy(self, name: str) -> str:
        """What to do instead of asking for a field that is not served."""
        return self._remedies.get(name, "leave it out")

    def described(self, name: str) -> dict[str, Any]:
        """The schema of a field that is not served."""
        if name in self.without_effect:
            return {"description": f"Without effect: {self.without_effect[name]}."}
        return {
            "enum": [None, *self.harmless.get(name, ())],
            "description": f"Not served: {self.remedy(name)}.",
        }

    def _changes_nothing(self, name: str, raw: bytes) -> bool:
        harmless = self.harmless.get(name)
        if not harmless:
            return False
        value = decode(_anything, raw)
        # For Python 0 is False.
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless)
