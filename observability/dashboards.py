"""`python -m observability.dashboards [--check]`: writes the Grafana dashboards from the declared metrics.

The JSON files are generated so that a metric which is renamed or dropped cannot stay on a dashboard; a test
holds the files to this module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from observability import names
from observability.grafana_model import Dashboard, Panel, Query, gauge, mean, quantile, rate, to_json
from observability.names import Metric

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
# Misses that a promise allows: one request in a hundred.
_ERROR_BUDGET = 0.01


def _quantiles(title: str, metric: Metric, by: str = "", where: str = "", description: str = "") -> Panel:
    legend = f" {{{{{by}}}}}" if by else ""
    queries = [
        Query(quantile(share, metric, by, where), f"p{share * 100:g}{legend}") for share in (0.5, 0.95, 0.99)
    ]
    return Panel(title, "s", queries, description or metric.meaning)


_TIER = 'tier=~"$tier"'
_MISSES = 'met="false", tier=~"$tier"'


def _burn(window: str) -> str:
    missed = f"sum by (tier, objective) (rate({names.SLO.name}{{{_MISSES}}}[{window}]))"
    judged = f"sum by (tier, objective) (rate({names.SLO.name}{{{_TIER}}}[{window}]))"
    return f"{missed} / {judged} / {_ERROR_BUDGET}"


def _overview() -> Dashboard:
    failed = 'outcome="failed"'
    return Dashboard(
        "millrace-overview",
        "Millrace: overview",
        [
            (
                "Requests",
                [
                    Panel(
                        "Requests by outcome",
                        "reqps",
                        [Query(rate(names.REQUESTS, "outcome"), "{{outcome}}")],
                    ),
                    Panel(
                        "Refusals by reason", "reqps", [Query(rate(names.REJECTIONS, "reason"), "{{reason}}")]
                    ),
                    Panel(
                        "Share that fails",
                        "percentunit",
                        [Query(f"{rate(names.REQUESTS, where=failed)} / {rate(names.REQUESTS)}", "failed")],
                        threshold=0.02,
                    ),
                    _quantiles("Time to first token", names.TTFT),
                    _quantiles("Time per output token", names.TPOT),
                    _quantiles("Request duration", names.E2E),
                ],
            ),
            (
                "Where the time to the first token goes",
                [
                    Panel(
                        "Mean of each part",
                        "s",
                        [Query(mean(names.TTFT_PART, "part"), "{{part}}")],
                        "The parts sum to the time to the first token.",
                    ),
                    _quantiles("Authorization", names.AUTHORIZE_SECONDS),
                    _quantiles("Tokenizer stages", names.TOKENIZER_STAGE_SECONDS, "stage"),
                ],
            ),
            (
                "Work",
                [
                    Panel(
                        "Tokens",
                        "short",
                        [Query(rate(names.TOKENS, "kind"), "{{kind}}")],
                        names.TOKENS.meaning,
                    ),
                    Panel(
                        "Active requests", "short", [Query(gauge(names.ACTIVE_STREAMS, "tier"), "{{tier}}")]
                    ),
                    Panel(
                        "Engines that gateways can use", "short", [Query(gauge(names.ENGINES_UP, "instance"))]
                    ),
                    Panel(
                        "Grammars found in the cache",
                        "percentunit",
                        [
                            Query(
                                f"""{rate(names.GRAMMAR_LOOKUPS, where='result="hit"')} / """
                                f"{rate(names.GRAMMAR_LOOKUPS)}",
                                "hit",
                            )
                        ],
                    ),
                    _quantiles("Grammar compilation", names.GRAMMAR_COMPILE_SECONDS),
                    Panel(
                        "Guided outputs by validity",
                        "short",
                        [Query(rate(names.GUIDED_OUTPUTS, "kind, valid"), "{{kind}} {{valid}}")],
                    ),
                ],
            ),
        ],
    )


def _tiers() -> Dashboard:
    met = (
        f"sum by (tier, objective) (increase({names.SLO.name}{{{_MISSES}}}[30d])) / "
        f"sum by (tier, objective) (increase({names.SLO.name}{{{_TIER}}}[30d]))"
    )
    return Dashboard(
        "millrace-tiers",
        "Millrace: tiers and promises",
        [
            (
                "Promises",
                [
                    Panel(
                        "Error budget left (30 days)",
                        "percentunit",
                        [Query(f"1 - ({met}) / {_ERROR_BUDGET}", "{{tier}} {{objective}}")],
                        "1 is untouched, below 0 the promise is broken.",
                    ),
                    Panel(
                        "Burn rate, 1 hour",
                        "short",
                        [Query(_burn("1h"), "{{tier}} {{objective}}")],
                        "1 spends the budget exactly in 30 days; PromiseBurnsFast pages at 14.4.",
                        threshold=14.4,
                    ),
                    Panel(
                        "Burn rate, 6 hours",
                        "short",
                        [Query(_burn("6h"), "{{tier}} {{objective}}")],
                        threshold=6.0,
                    ),
                ],
            ),
            (
                "What clients see",
                [
                    _quantiles("Time to first token", names.TTFT, "tier", _TIER),
                    _quantiles("Time per output token", names.TPOT, "tier", _TIER),
                    _quantiles("Gap between outputs", names.ITL, "tier", _TIER),
                    Panel(
                        "Time to first token by prompt length",
                        "s",
                        [Query(quantile(0.95, names.TTFT, "prompt_bucket", _TIER), "p95 {{prompt_bucket}}")],
                    ),
                    Panel(
                        "Time to first token by cache",
                        "s",
                        [Query(quantile(0.95, names.TTFT, "cache", _TIER), "p95 {{cache}}")],
                    ),
                    Panel(
                        "Refusals",
                        "reqps",
                        [Query(rate(names.REJECTIONS, "tier, reason", _TIER), "{{tier}} {{reason}}")],
                    ),
                ],
            ),
            (
                "What holds requests back",
                [
                    _quantiles("Time in the queue", names.QUEUE_SECONDS, "tier", _TIER),
                    Panel(
                        "Seconds lost per second, by cause",
                        "short",
                        [Query(rate(names.DELAYED_SECONDS, "cause", _TIER), "{{cause}}")],
                        names.DELAYED_SECONDS.meaning,
                    ),
                    Panel(
                        "Wait that admission expects",
                        "s",
                        [Query(gauge(names.EXPECTED_WAIT, "tier", "max", _TIER), "{{tier}}")],
                    ),
                ],
            ),
        ],
        [("tier", names.REQUESTS)],
    )


# Series of the engines that are chosen on the page.
_HERE = 'instance=~"$instance"'


def _engines() -> Dashboard:
    return Dashboard(
        "millrace-engines",
        "Millrace: engines",
        [
            ("Load", _engine_load()),
            ("Steps", _engine_steps()),
            ("KV cache", _engine_cache()),
            ("Memory", _engine_memory()),
        ],
        [("instance", names.REQUESTS_RUNNING)],
    )


def _engine_load() -> list[Panel]:
    return [
        Panel(
            "Running and waiting",
            "short",
            [
                Query(gauge(names.REQUESTS_RUNNING, "instance", where=_HERE), "running {{instance}}"),
                Query(gauge(names.REQUESTS_WAITING, "instance", where=_HERE), "waiting {{instance}}"),
            ],
        ),
        Panel(
            "Oldest request in the queue",
            "s",
            [Query(gauge(names.OLDEST_WAIT, "instance", "max", _HERE), "{{instance}}")],
            threshold=30,
        ),
        Panel(
            "Prompt tokens to compute",
            "short",
            [Query(gauge(names.PENDING_PREFILL, "instance", where=_HERE), "{{instance}}")],
        ),
        Panel(
            "Generated tokens",
            "short",
            [Query(rate(names.GENERATED_TOKENS, "instance", _HERE), "{{instance}}")],
        ),
        Panel(
            "Prompt tokens by source",
            "short",
            [Query(rate(names.PROMPT_TOKENS_DONE, "source", _HERE), "{{source}}")],
        ),
        Panel(
            "Cancelled",
            "reqps",
            [Query(rate(names.ENGINE_CANCELLED, "reason", _HERE), "{{reason}}")],
        ),
    ]


def _engine_steps() -> list[Panel]:
    return [
        _quantiles("Step", names.STEP_SECONDS, "kind", _HERE),
        Panel(
            "Tokens in a step",
            "short",
            [Query(mean(names.STEP_TOKENS, "instance", _HERE), "mean {{instance}}")],
        ),
        Panel(
            "Sequences in a step",
            "short",
            [Query(mean(names.STEP_SEQUENCES, "instance", _HERE), "mean {{instance}}")],
        ),
        _quantiles("Prefill", names.PREFILL_SECONDS, where=_HERE),
        _quantiles("Decode", names.DECODE_SECONDS, where=_HERE),
        Panel(
            "Time on grammar masks",
            "s",
            [Query(rate(names.GRAMMAR_SECONDS, "instance", _HERE), "{{instance}}")],
        ),
    ]


def _engine_cache() -> list[Panel]:
    hits = f"{rate(names.PREFIX_HITS, where=_HERE)} / {rate(names.PREFIX_QUERIES, where=_HERE)}"
    accepted = f"{rate(names.ACCEPTED, where=_HERE)} / {rate(names.DRAFTED, where=_HERE)}"
    return [
        Panel(
            "Use",
            "percentunit",
            [Query(gauge(names.KV_USAGE, "instance", "max", _HERE), "{{instance}}")],
            threshold=0.95,
        ),
        Panel("Prefix cache hits", "percentunit", [Query(hits, "hits")]),
        Panel(
            "Blocks by state",
            "short",
            [Query(gauge(names.KV_BLOCKS, "state", where=_HERE), "{{state}}")],
        ),
        Panel(
            "Preemptions",
            "short",
            [
                Query(rate(names.PREEMPTIONS, "instance", _HERE), "preempted {{instance}}"),
                Query(rate(names.RECOMPUTED, "instance", _HERE), "tokens again {{instance}}"),
            ],
        ),
        Panel(
            "Evicted and offloaded blocks",
            "short",
            [
                Query(rate(names.EVICTIONS, where=_HERE), "evicted"),
                Query(rate(names.OFFLOADED, "direction", _HERE), "host {{direction}}"),
            ],
        ),
        Panel("Accepted drafts", "percentunit", [Query(accepted, "accepted")]),
    ]


def _engine_memory() -> list[Panel]:
    return [
        Panel(
            "The memory plan",
            "bytes",
            [Query(gauge(names.MEMORY_PLAN, "part", "max", _HERE), "{{part}}")],
            names.MEMORY_PLAN.meaning,
        ),
        Panel(
            "Requests ended by failed steps",
            "short",
            [Query(rate(names.STEP_FAILURES, "instance", _HERE), "{{instance}}")],
        ),
    ]


def _tenants() -> Dashboard:
    mine = 'tenant=~"$tenant"'
    met = 'met="true", tenant=~"$tenant"'
    return Dashboard(
        "millrace-tenants",
        "Millrace: tenants and cost",
        [
            (
                "Use",
                [
                    Panel("Requests", "reqps", [Query(rate(names.REQUESTS, "tenant", mine), "{{tenant}}")]),
                    Panel("Tokens", "short", [Query(rate(names.TOKENS, "tenant", mine), "{{tenant}}")]),
                    Panel("Tokens by kind", "short", [Query(rate(names.TOKENS, "kind", mine), "{{kind}}")]),
                    Panel(
                        "Cost in 24 hours",
                        "short",
                        [
                            Query(
                                f"sum by (tenant) (increase({names.COST.name}{{{mine}}}[24h]))", "{{tenant}}"
                            )
                        ],
                        names.COST.meaning,
                        kind="bargauge",
                    ),
                    Panel(
                        "Requests refused, cancelled or failed",
                        "reqps",
                        [
                            Query(
                                rate(names.REQUESTS, "tenant, outcome", 'outcome!="ok", tenant=~"$tenant"'),
                                "{{tenant}} {{outcome}}",
                            )
                        ],
                    ),
                    Panel(
                        "Promises kept",
                        "percentunit",
                        [
                            Query(
                                f"{rate(names.SLO, 'tenant, objective', met)} / "
                                f"{rate(names.SLO, 'tenant, objective', mine)}",
                                "{{tenant}} {{objective}}",
                            )
                        ],
                    ),
                ],
            ),
            (
                "Books",
                [
                    Panel(
                        "Ledger entries waiting", "short", [Query(gauge(names.LEDGER_PENDING, "instance"))]
                    ),
                    Panel(
                        "Shared limit store",
                        "short",
                        [Query(gauge(names.LIMIT_STORE_UP, "instance", "min"), "{{instance}}")],
                    ),
                ],
            ),
        ],
        [("tenant", names.REQUESTS)],
    )


def dashboards() -> list[Dashboard]:
    """All pages."""
    return [_overview(), _tiers(), _engines(), _tenants()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files; with --check, 1 when one of them is out of date."""
    parser = argparse.ArgumentParser(prog="python -m observability.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is out of date")
    parsed = parser.parse_args(arguments)
    stale = 0
    for dashboard in dashboards():
        path = FOLDER / f"{dashboard.uid}.json"
        text = to_json(dashboard)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if parsed.check:
            print(f"{path} is out of date; run python -m observability.dashboards", file=sys.stderr)
            stale = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
