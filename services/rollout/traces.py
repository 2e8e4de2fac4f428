"""Spans of rollouts: every decision that is written down is one, with its evidence, and the gate's suite is.

A rollout is one trace, whoever decides: what has been counted carries its root's context. `store` ends a span
with the transaction that it tells of.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from observability.emit import config as observability
from observability.emit import rollouts, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import RemoteSpan, Telemetry
from services.gate.cases import GateVerdict
from services.rollout.evidence import Evidence

_EXPORT_DELAY_MS = 100


class RolloutTraces:
    """Makes the spans of one process. Without telemetry it records nothing."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self._telemetry = telemetry or Telemetry(rollouts.ROLLOUT, ObservabilityConfig(), None)

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> RolloutTraces:
        """Spans as `[observability]` and OpenTelemetry's variables say; raises ConfigError.

        Decisions are few, so all are recorded, whatever share of requests is, unless that is none; and at
        once, because a watcher that is killed sends nothing more.
        """
        config = observability.load(tables)
        share = 1.0 if config.sample_ratio else 0.0
        config = msgspec.structs.replace(config, sample_ratio=share, export_delay_ms=_EXPORT_DELAY_MS)
        return cls(tracing.setup(rollouts.ROLLOUT, config))

    def start(self, traceparent: str = "") -> Span:
        """A decision's span in the trace of its rollout; without one it is the root of another trace."""
        parent = RemoteSpan(traceparent) if traceparent else None
        return self._telemetry.start(rollouts.DECISION, parent=parent)

    def end(self, span: Span, told: Mapping[str, AttributeValue], evidence: Sequence[Evidence]) -> None:
        """The decision is written down; `told` has attributes of `rollouts`."""
        self._telemetry.end(span, attributes={**told, **_shown(evidence)})

    def suite(self, traceparent: str, began_s: float, verdict: GateVerdict, note: str) -> None:
        """The suite was run from `began_s` in monotonic seconds until now."""
        self._telemetry.record(
            rollouts.SUITE,
            start_s=began_s,
            end_s=time.monotonic(),
            parent=RemoteSpan(traceparent),
            attributes={rollouts.VERDICT: verdict.value, rollouts.REASON: note},
        )

    def close(self) -> None:
        """Sends what there is; a receiver that is away is not waited for."""
        self._telemetry.shutdown()


def _shown(evidence: Sequence[Evidence]) -> dict[str, AttributeValue]:
    return {
        attribute: msgspec.to_builtins(getattr(each, field))
        for each in evidence
        for field, attribute in rollouts.EVIDENCE[each.figure].items()
    }
