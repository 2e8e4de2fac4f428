"""What becomes of every option of a request at a vLLM engine. The documentation's table is this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from contract.errors import MillraceError, unsupported
from contract.sampling import OPTIONS as DECLARED
from contract.sampling import special_needs
from engine.types import Request

Verdict = Literal["honoured", "approximated", "refused"]


class Support(NamedTuple):
    """How far vLLM keeps an option, and what differs."""

    verdict: Verdict
    note: str = ""


# Options that vLLM keeps in part or not at all.
EXCEPTIONS: dict[str, Support] = {
    "presence_penalty": Support("approximated", "exact, save for a token on both sides of a continuation"),
    "seed": Support(
        "approximated",
        "the same tokens again at vLLM under the same batch; others than this suite's own engine draws, and "
        "the rest of a continued answer is drawn afresh",
    ),
    "retention": Support(
        "refused", "`kv`: vLLM forgets nothing of one answer alone; if_possible is followed"
    ),
    "pooling": Support("honoured", "by cls, last and mean; a model with another pooling is refused at start"),
    "best_of": Support("refused", "more candidates than answers; best_of = n is honoured"),
    "beam_width": Support("refused", "vLLM has no beam search in its engine"),
    "grammar": Support(
        "approximated",
        "the same serialized grammar, under vLLM's own llguidance; an answer that reaches max_tokens is cut, "
        "not led to its end",
    ),
    "output_token_ids": Support("approximated", "continued; greedy text may differ in the last bits"),
    "tenant": Support(
        "approximated", "fair order by weight for batch slots; no shares of slots that are taken"
    ),
    "priority": Support(
        "approximated", "goes first and takes blocks from lower tiers; takes no slot from a running request"
    ),
    "queue_deadline_s": Support("approximated", "refused at the door by a coarser forecast"),
    "ttft_deadline_s": Support("approximated", "within a tier the order is fair, not by deadline"),
    "tpot_target_s": Support(
        "approximated", "steps are as long as max_num_batched_tokens allows, whoever is answered in them"
    ),
}
# Options that it keeps as they are: a new one is refused until somebody has looked it up, and named it here.
_HONOURED = (
    *("temperature", "top_k", "top_p", "min_p", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "n", "logprobs"),
    *("max_thinking_tokens", "prompt_logprobs", "adapter", "cache_salt", "deadline_s", "max_context_tokens"),
)
# Fields of SamplingParams, and those of Request whose effect somebody can notice.
OPTIONS: dict[str, Support] = {**dict.fromkeys(_HONOURED, Support("honoured")), **EXCEPTIONS}

# Options that engines of this make say they lack (EngineInfo.unsupported).
REFUSED = tuple(name for name, support in OPTIONS.items() if support.verdict == "refused")


def refuse(request: Request, named: Mapping[str, Support] = OPTIONS) -> MillraceError | None:
    """The refusal of a request that uses what vLLM lacks, or an option that is not `named`; None when it has
    all.
    """
    sampling = request.sampling
    needs = special_needs(sampling)
    for name, declared in DECLARED.items():
        if name in needs:
            return _lacks(name, OPTIONS[name].note)
        if name not in named and getattr(sampling, name) != declared.neutral:
            return _lacks(name, "nobody has said what becomes of it there")
    return None


def _lacks(name: str, why: str) -> MillraceError:
    return unsupported(
        f"sampling.{name}",
        "leave it out, or ask for a pool of another make",
        f"not at a vLLM engine: {why}",
    )


def table() -> str:
    """The table of docs/engines.md."""
    rows = [f"| `{name}` | {support.verdict} | {support.note} |" for name, support in OPTIONS.items()]
    return "\n".join(["| option | at vLLM | what differs |", "|---|---|---|", *rows]) + "\n"
