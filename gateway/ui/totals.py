"""What `millrace top` shows, from inside a gateway: its own counters by tier, and what engines report.

`gateway.ui.endpoints` answers operators with it. Counters are told as they stand: two answers give
rates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from gateway.engines.attachment import Attachment
from gateway.ui.answer_types import EngineCard, TierTotals
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.names import Metric

_READ = (
    names.ACTIVE_STREAMS,
    names.REQUESTS,
    names.REJECTIONS,
    names.SLO,
    names.GOODPUT,
    names.TOKENS,
    names.COST,
)
_HISTOGRAMS = (names.TTFT, names.TPOT)


class MetricTotals:
    """The present values of the metrics that say how tiers fare."""

    def __init__(self, metrics: Metrics) -> None:
        wanted = {each.name for each in _READ} | {f"{each.name}_bucket" for each in _HISTOGRAMS}
        self._values: defaultdict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in metrics.registry.collect():
            for sample in family.samples:
                if sample.name in wanted:
                    self._values[sample.name].append((sample.labels, sample.value))

    def tiers(self, configured: Iterable[str]) -> list[TierTotals]:
        """Those that are configured."""
        return [self._tier(name) for name in configured]

    def _tier(self, tier: str) -> TierTotals:
        return TierTotals(
            name=tier,
            active=round(self._sum(names.ACTIVE_STREAMS, tier=tier)),
            num_requests=round(self._sum(names.REQUESTS, tier=tier)),
            num_refused=round(self._sum(names.REJECTIONS, tier=tier)),
            num_judged=round(self._sum(names.SLO, tier=tier)),
            num_met=round(self._sum(names.SLO, tier=tier, met="true")),
            completion_tokens=round(self._sum(names.TOKENS, tier=tier, kind="completion")),
            num_good=round(self._sum(names.GOODPUT, tier=tier, met="true")),
            cost=self._sum(names.COST, tier=tier),
            ttft_buckets=self._buckets(names.TTFT, tier=tier),
            tpot_buckets=self._buckets(names.TPOT, tier=tier),
        )

    def _sum(self, metric: Metric, **labels: str) -> float:
        return sum(value for each, value in self._values[metric.name] if labels.items() <= each.items())

    def _buckets(self, metric: Metric, **labels: str) -> list[tuple[float | None, int]]:
        found: defaultdict[float, float] = defaultdict(float)
        for each, value in self._values[f"{metric.name}_bucket"]:
            if labels.items() <= each.items():
                found[float(each["le"])] += value
        return [
            (None if math.isinf(bound) else bound, round(count)) for bound, count in sorted(found.items())
        ]


def engine_cards(attachments: Iterable[Attachment]) -> list[EngineCard]:
    """Every engine that is wanted, attached or not."""
    return [_engine(each) for each in attachments]


def _engine(attachment: Attachment) -> EngineCard:
    load, info = attachment.load, attachment.info
    used = load.num_total_blocks - load.num_free_blocks
    return EngineCard(
        address=attachment.target,
        model=None if info is None else info.model_key,
        state=attachment.state.value,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        oldest_wait_s=load.oldest_wait_s,
        kv_usage=used / load.num_total_blocks if load.num_total_blocks else None,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_tokens_per_s=load.decode_tokens_per_s,
        step_p50_s=load.step_p50_s or None,
        prefix_queried_tokens=load.prefix_queried_tokens,
        prefix_hit_tokens=load.prefix_hit_tokens,
        num_preemptions=load.num_preemptions,
    )
