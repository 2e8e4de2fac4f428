"""What `millrace shadows` reads of the gateways' metrics."""

from __future__ import annotations

from observability.analysis.scrape import parse
from observability.analysis.shadows import rows

PAGE = """
# TYPE millrace_shadow_requests_total counter
millrace_shadow_requests_total{model="chat",shadow="new",outcome="same"} 3
millrace_shadow_requests_total{model="chat",shadow="new",outcome="different"} 1
millrace_shadow_requests_total{model="chat",shadow="new",outcome="dropped"} 2
# TYPE millrace_shadow_agreement_ratio histogram
millrace_shadow_agreement_ratio_bucket{model="chat",shadow="new",le="+Inf"} 4
millrace_shadow_agreement_ratio_sum{model="chat",shadow="new"} 3.5
millrace_shadow_agreement_ratio_count{model="chat",shadow="new"} 4
# TYPE millrace_shadow_outputs_total counter
millrace_shadow_outputs_total{model="chat",shadow="new",side="live",valid="true"} 2
millrace_shadow_outputs_total{model="chat",shadow="new",side="shadow",valid="true"} 1
millrace_shadow_outputs_total{model="chat",shadow="new",side="shadow",valid="false"} 1
# TYPE millrace_shadow_cost_total counter
millrace_shadow_cost_total{model="chat",shadow="new",side="live"} 0.5
millrace_shadow_cost_total{model="chat",shadow="new",side="shadow"} 0.25
"""


def test_a_row_for_each_shadow_over_all_gateways() -> None:
    one = parse(PAGE, 0.0)
    (row,) = rows([one, one])
    assert row == (
        *("chat", "new", "6", "2", "0", "0", "4", "87.5%"),
        *("100% / 50%", "- / -", "- / -", "1 / 0.5"),
    )
    assert list(rows([parse("", 0.0)])) == []
