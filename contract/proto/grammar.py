"""Compiled grammars, reports and verdicts: to messages, or the fields of one, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.common.v1 import grammar_pb2

from contract.grammar import EnforcementReport, GrammarSpec, KeywordStatus, Verdict


def grammar_fields(grammar: GrammarSpec) -> dict[str, Any]:
    """The fields of a grammar's message."""
    return {"digest": grammar.digest, "payload": grammar.payload, "backend": grammar.backend}


def grammar(message: grammar_pb2.GrammarArtifact) -> GrammarSpec:
    """A grammar from the wire."""
    return GrammarSpec(digest=message.digest, payload=message.payload, backend=message.backend)


def report_message(report: EnforcementReport) -> grammar_pb2.EnforcementReport:
    """A report for the wire."""
    return grammar_pb2.EnforcementReport(
        enforced=map(_status_message, report.enforced),
        approximated=map(_status_message, report.approximated),
        unenforced=map(_status_message, report.unenforced),
    )


def _status_message(status: KeywordStatus) -> grammar_pb2.KeywordStatus:
    return grammar_pb2.KeywordStatus(keyword=status.keyword, path=status.path, note=status.note)


def report(message: grammar_pb2.EnforcementReport) -> EnforcementReport:
    """A report from the wire."""

    def statuses(items: Iterable[grammar_pb2.KeywordStatus]) -> tuple[KeywordStatus, ...]:
        return tuple(KeywordStatus(item.keyword, item.path, item.note) for item in items)

    return EnforcementReport(
        statuses(message.enforced), statuses(message.approximated), statuses(message.unenforced)
    )


def verdict_message(verdict: Verdict) -> grammar_pb2.OutputVerdict:
    """A verdict for the wire."""
    return grammar_pb2.OutputVerdict(
        valid=verdict.valid,
        keyword=verdict.keyword,
        schema_path=verdict.schema_path,
        instance_path=verdict.instance_path,
        message=verdict.message,
    )


def verdict(message: grammar_pb2.OutputVerdict) -> Verdict:
    """A verdict from the wire."""
    return Verdict(
        valid=message.valid,
        keyword=message.keyword,
        schema_path=message.schema_path,
        instance_path=message.instance_path,
        message=message.message,
    )
