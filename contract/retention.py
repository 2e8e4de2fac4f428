"""What an answer may forget of its keys and values, as clients, tiers and engines say it."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import msgspec

from contract.sampling import Refuse

RetentionPolicy: TypeAlias = Literal["full", "window+sinks", "snapkv", "h2o", "kvzap"]

FULL: RetentionPolicy = "full"
POLICIES: tuple[RetentionPolicy, ...] = get_args(RetentionPolicy)
# Those that choose among the prompt's tokens, once it is computed: by attention (arXiv 2404.14469 and
# 2306.14048), or by what a scorer that was trained for the model says of them (2601.07891).
CHOOSING: tuple[RetentionPolicy, ...] = ("snapkv", "h2o", "kvzap")
SCORED: RetentionPolicy = "kvzap"
# It is computed anew with all of its keys and values, and goes on so; or it ends with an error.
Beyond: TypeAlias = Literal["recompute", "refuse"]
RECOMPUTE: Beyond = "recompute"
BEYOND: tuple[Beyond, ...] = get_args(Beyond)
MOST_WINDOW_TOKENS = 2**31 - 1


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """`kv` of a request, as it came: `check` says what is wrong with it."""

    policy: str = FULL
    # Part of the prompt's tokens that is kept while the answer is made, above 0 and at most 1.
    keep: float | None = None
    # The same as a number of tokens, for answers that are longer than their prompts.
    window_tokens: int | None = None
    # Share of its attention that the answer may lose by that; what it lost at most is reported then. None:
    # nobody looks at what it loses.
    max_lost: float | None = None
    # What becomes of an answer that would lose more.
    beyond: str = RECOMPUTE
    # A tier's own, which nobody asked for: where a model can forget nothing, it forgets nothing.
    if_possible: bool = False

    @property
    def forgets(self) -> bool:
        """Whether anything may be forgotten."""
        return self.policy != FULL

    @property
    def outlives_positions(self) -> bool:
        """Whether the answer may be longer than the model has positions. One that may have to be computed
        anew with all of its keys may not, nor one of which a model may forget nothing.
        """
        return self.policy == "window+sinks" and self.max_lost is None and not self.if_possible

    def tokens_of(self, num_prompt_tokens: int) -> int:
        """Tokens that are kept of a prompt of so many, and from then on."""
        if self.window_tokens is not None:
            return self.window_tokens
        assert self.keep is not None, "as checked"
        return math.ceil(self.keep * num_prompt_tokens)


def check(asked: Retention, refuse: Refuse, field: str = "kv") -> None:
    """Raises `refuse(name, problem)` for the first part of `field` that no engine could follow."""
    if asked.policy not in POLICIES:
        problem = f"{asked.policy[:80]!r} is not one of {', '.join(POLICIES)}: name one of these"
        raise refuse(f"{field}.policy", problem)
    if asked.keep is not None and not 0 < asked.keep <= 1:
        raise refuse(f"{field}.keep", f"{asked.keep} is not above 0 and at most 1: give the part to keep")
    if asked.window_tokens is not None and not 1 <= asked.window_tokens <= MOST_WINDOW_TOKENS:
        problem = f"{asked.window_tokens} is not between 1 and {MOST_WINDOW_TOKENS}: give tokens to keep"
        raise refuse(f"{field}.window_tokens", problem)
    if asked.max_lost is not None and not 0 < asked.max_lost <= 1:
        problem = f"{asked.max_lost} is not above 0 and at most 1: give the share of attention that may be "
        raise refuse(f"{field}.max_lost", problem + "lost; policy full loses none")
    if asked.beyond not in BEYOND:
        raise refuse(f"{field}.beyond", f"{asked.beyond[:80]!r} is not one of {', '.join(BEYOND)}: name one")
    given = [name for name in ("keep", "window_tokens", "max_lost") if getattr(asked, name) is not None]
    if not asked.forgets and given:
        problem = f"policy {FULL} keeps everything; leave it out, or ask for {POLICIES[1]}"
        raise refuse(f"{field}.{given[0]}", problem)
    given = [name for name in given if name != "max_lost"]
    if asked.forgets and len(given) != 1:
        remedy = "leave one out" if given else "give keep, a part of the prompt's tokens, or their number"
        problem = f"policy {asked.policy} takes exactly one of keep and window_tokens, and {len(given)} are "
        raise refuse(f"{field}.keep", f"{problem}given: {remedy}")
