"""What gateways and engines tell of prompts that one engine computes and another one answers."""

from __future__ import annotations

from observability.emit.names import counter, gauge, span

BLOCKS = counter(
    "millrace_engine_hand_over_blocks_total{direction=in|out}",
    "{block}",
    "Blocks that came from the engine that had computed a prompt, or went to the one that answers it.",
)
BYTES = counter("millrace_engine_hand_over_bytes_total{direction=in|out}", "By", "What these blocks hold.")
PULLS = counter(
    "millrace_engine_hand_over_pulls_total", "{pull}", "Prompts whose blocks were asked of another engine."
)
SECONDS = counter(
    "millrace_engine_hand_over_seconds_total",
    "s",
    "Time of these pulls, up to the last block or failure.",
)
FAILURES = counter(
    "millrace_engine_hand_over_failures_total{reason=lost|silence|gone|form|checksum|slow|late}",
    "{failure}",
    "Pulls that brought less than was asked for: the other engine was lost, silent, had let go, holds blocks "
    "of another form, sent damaged bytes, or computing was faster. Late are blocks of no pull, dropped.",
)
HELD = gauge(
    "millrace_engine_hand_over_held_blocks",
    "{block}",
    "Blocks held for others, beyond their requests.",
)
SPLITS = counter(
    "millrace_gateway_splits_total{outcome=handed_over|ended|late|lost|refused|cancelled}",
    "{request}",
    "Requests whose prompt was given to an engine that computes prompts: handed over to the one that answers "
    "or ended by the first token; or answered by one engine, since the other was late, lost or refused.",
)
GATEWAY_HAND_OVER = span(
    "gateway.hand_over",
    "From the first token, on the engine that computed the prompt, to the next on another.",
)
ALL = (SPLITS, BLOCKS, BYTES, PULLS, SECONDS, FAILURES, HELD)
