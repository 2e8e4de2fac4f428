"""What the service works on: plain data, independent of the wire and of the libraries underneath."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from contract.grammar import EnforcementReport, GrammarSpec


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar with the report of what it enforces; there is none for formats other than schemas."""

    artifact: GrammarSpec
    enforcement: EnforcementReport | None = None


class Truncation(StrEnum):
    """Which end of a prompt that is too long is kept."""

    REFUSE = "refuse"
    KEEP_END = "keep_end"
    KEEP_START = "keep_start"


class LengthLimit(msgspec.Struct, frozen=True):
    """How many tokens a prompt may have (None: any number), and what becomes of a longer one."""

    max_tokens: int | None = None
    truncation: Truncation = Truncation.REFUSE
