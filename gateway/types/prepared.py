"""A prompt made ready by the tokenizer service."""

from __future__ import annotations

import msgspec

from contract.grammar import EnforcementReport, GrammarSpec


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs of a prompt."""

    token_ids: tuple[int, ...]
    grammar: GrammarSpec | None = None
    enforcement: EnforcementReport | None = None
    vocabulary_fingerprint: str = ""
    # Text that the template placed at the start of the assistant turn, for the output parsers.
    assistant_prefix: str = ""
