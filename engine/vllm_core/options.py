"""What becomes of every option of a request at a vLLM engine. The documentation's table is this one."""

from __future__ import annotations

from typing import Literal, NamedTuple

from contract.errors import MillraceError, unsupported
from contract.sampling import SamplingParams
from engine.types import Request

Verdict = Literal["honoured", "approximated", "refused"]


class Holding(NamedTuple):
    """How far an option holds, and what differs."""

    verdict: Verdict
    note: str = ""


# What differs, of the fields of SamplingParams and of Request; all others hold.
EXCEPTIONS: dict[str, Holding] = {
    "presence_penalty": Holding("approximated", "exact, save for a token on both sides of a continuation"),
    "seed": Holding(
        "approximated",
        "the same tokens again at vLLM under the same batch; others than this suite's own engine draws, and "
        "the rest of a continued answer is drawn afresh",
    ),
    "best_of": Holding("refused", "more candidates than answers; best_of = n is honoured"),
    "beam_width": Holding("refused", "vLLM has no beam search in its engine"),
    "grammar": Holding(
        "approximated",
        "the same serialized grammar, under vLLM's own llguidance; an answer that reaches max_tokens is cut, "
        "not led to its end",
    ),
    "output_token_ids": Holding("approximated", "continued; greedy text may differ in the last bits"),
    "tenant": Holding("approximated", "fair turns by weight for places; no shares of places that are held"),
    "priority": Holding(
        "approximated", "goes first and takes blocks from lower tiers; takes no place that is held"
    ),
    "queue_deadline_s": Holding("approximated", "refused at the door by a coarser forecast"),
    "ttft_deadline_s": Holding("approximated", "within a tier turns are fair, not by deadline"),
}
# What of a request, beside how tokens are drawn, somebody can notice.
_NOTICED = (
    *("grammar", "output_token_ids", "adapter", "tenant", "priority", "cache_salt"),
    *("queue_deadline_s", "ttft_deadline_s", "deadline_s", "max_context_tokens"),
)
OPTIONS: dict[str, Holding] = {
    name: EXCEPTIONS.get(name, Holding("honoured")) for name in (*SamplingParams.__struct_fields__, *_NOTICED)
}

# Options that engines of this make say they lack (EngineInfo.unsupported).
REFUSED = tuple(name for name, holding in OPTIONS.items() if holding.verdict == "refused")


def refuse(request: Request) -> MillraceError | None:
    """The refusal of a request that needs what vLLM lacks; None when it has all."""
    sampling = request.sampling
    if sampling.beam_width:
        return _lacks("sampling.beam_width", "beam_width")
    if sampling.best_of > sampling.n:
        return _lacks("sampling.best_of", "best_of")
    return None


def _lacks(field: str, name: str) -> MillraceError:
    return unsupported(
        field,
        "leave it out, or ask for a pool of another make",
        f"not at a vLLM engine: {OPTIONS[name].note}",
    )


def table() -> str:
    """The table of docs/engines.md."""
    rows = [f"| `{name}` | {holding.verdict} | {holding.note} |" for name, holding in OPTIONS.items()]
    return "\n".join(["| option | at vLLM | what differs |", "|---|---|---|", *rows]) + "\n"
