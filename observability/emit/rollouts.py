"""What a rollout's spans say: each of its decisions, with the evidence that it rests on.

A rollout is one trace. Its root is the decision that began it; below that is every later one, by whoever made
it, and the gate's suite. No request's spans are in it.
"""

from __future__ import annotations

from observability.emit.names import Attribute, attribute, span

# service.name of the trace resource: whoever watches, or decides by hand.
ROLLOUT = "rollout"

DECISION = span("rollout.decision", "One decision of a rollout, as long as it took to write it down.")
SUITE = span("rollout.suite", "The gate's suite, which both models answer beside the traffic.")

ALIAS = attribute("millrace.rollout.alias", "", "Alias of [routes] whose requests move.")
CANDIDATE = attribute("millrace.rollout.candidate", "", "Model that they move to.")
ACTION = attribute("millrace.rollout.action", "", "begin, advance, hold or take back.")
WHY = attribute("millrace.rollout.why", "", "What decided: worse, good, requests, by hand, ...")
REASON = attribute("millrace.rollout.reason", "", "The same in words, with the figures that decided.")
WHO = attribute("millrace.rollout.who", "", "Who decided: a watcher, or a person.")
SHARE_BEFORE = attribute("millrace.rollout.share_before", "1", "The candidate's share until then.")
SHARE_AFTER = attribute("millrace.rollout.share_after", "1", "The candidate's share from then on.")
VERDICT = attribute("millrace.rollout.verdict", "", "The suite's verdict, on its span.")

# What a decision says of each figure.
FIGURES = ("errors", "goodput", "validity", "shadow pairs", "shadow agreement")
_FIELDS = {
    "verdict": ("", "Whether the candidate is shown to be worse"),
    "baseline": ("1", "Share of the baseline's that is bad"),
    "candidate": ("1", "Share of the candidate's that is bad"),
    "num_baseline": ("{request}", "Of how many of the baseline's"),
    "num_candidate": ("{request}", "Of how many of the candidate's"),
    "lower": ("1", "By how much worse it is at least, at every look"),
    "upper": ("1", "By how much worse it is at most, at every look"),
    "delta": ("1", "How much worse would be worse"),
}
EVIDENCE: dict[str, dict[str, Attribute]] = {
    figure: {
        field: attribute(f"millrace.rollout.{figure.replace(' ', '_')}.{field}", unit, f"{about}: {figure}.")
        for field, (unit, about) in _FIELDS.items()
    }
    for figure in FIGURES
}
