"""Compiled output constraints, and what is reported about them."""

from __future__ import annotations

import msgspec


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled constraint, opaque to all but the engine. `digest` is the SHA-256 of payload and vocabulary
    fingerprint; `backend` names the library that understands the payload.
    """

    digest: str
    payload: bytes
    backend: str


class KeywordStatus(msgspec.Struct, frozen=True):
    """A schema keyword, where it stands (JSON pointer), and why it is not, or not exactly, enforced."""

    keyword: str
    path: str
    note: str = ""


class EnforcementReport(msgspec.Struct, frozen=True):
    """What of a schema holds by construction."""

    enforced: tuple[KeywordStatus, ...] = ()
    approximated: tuple[KeywordStatus, ...] = ()
    unenforced: tuple[KeywordStatus, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every keyword is enforced."""
        return not self.approximated and not self.unenforced


class Verdict(msgspec.Struct, frozen=True):
    """Whether a finished text matches its schema as it was sent, or what it breaks first."""

    valid: bool
    keyword: str = ""
    # Both paths are JSON pointers.
    schema_path: str = ""
    instance_path: str = ""
    message: str = ""
