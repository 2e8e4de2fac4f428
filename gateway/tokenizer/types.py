"""What the tokenizer service answers, in plain data."""

from __future__ import annotations

import msgspec

from gateway.engines.types import Grammar


class KeywordStatus(msgspec.Struct, frozen=True):
    """A schema keyword, where it stands (JSON pointer), and why it is not exactly enforced."""

    keyword: str
    path: str
    note: str


class Enforcement(msgspec.Struct, frozen=True):
    """What of a response format holds by construction."""

    enforced: tuple[KeywordStatus, ...] = ()
    approximated: tuple[KeywordStatus, ...] = ()
    unenforced: tuple[KeywordStatus, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """Whether a finished text matches its schema as it was sent, and else what it breaks first."""

    valid: bool
    keyword: str = ""
    schema_path: str = ""
    instance_path: str = ""
    message: str = ""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs of a prompt."""

    token_ids: tuple[int, ...]
    grammar: Grammar | None = None
    enforcement: Enforcement | None = None
    vocabulary_fingerprint: str = ""
    compile_s: float = 0.0
    grammar_cached: bool = False
    # Text that the template placed at the start of the assistant turn, for the output parsers.
    assistant_prefix: str = ""
