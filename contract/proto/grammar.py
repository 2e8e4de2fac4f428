"""Compiled grammars, reports and verdicts: to messages, or the fields of one, and back."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.common.v1 import grammar_pb2
from msgspec.structs import asdict

from contract.grammar import EnforcementReport, GrammarSpec, KeywordStatus, Verdict


def grammar_fields(grammar: GrammarSpec) -> dict[str, Any]:
    """The fields of a grammar's message."""
    return asdict(grammar)


def grammar(message: grammar_pb2.GrammarArtifact) -> GrammarSpec:
    """A grammar from the wire."""
    return msgspec.convert(message, GrammarSpec, from_attributes=True)


def report_message(report: EnforcementReport) -> grammar_pb2.EnforcementReport:
    """A report for the wire."""
    fields: Any = {name: list(map(asdict, statuses)) for name, statuses in asdict(report).items()}
    return grammar_pb2.EnforcementReport(**fields)


def report(message: grammar_pb2.EnforcementReport) -> EnforcementReport:
    """A report from the wire."""

    def statuses(name: str) -> tuple[KeywordStatus, ...]:
        return tuple(
            msgspec.convert(each, KeywordStatus, from_attributes=True) for each in getattr(message, name)
        )

    return EnforcementReport(*map(statuses, EnforcementReport.__struct_fields__))


def verdict_message(verdict: Verdict) -> grammar_pb2.OutputVerdict:
    """A verdict for the wire."""
    return grammar_pb2.OutputVerdict(**asdict(verdict))


def verdict(message: grammar_pb2.OutputVerdict) -> Verdict:
    """A verdict from the wire."""
    return msgspec.convert(message, Verdict, from_attributes=True)
