"""Prompts that nobody has computed before, as long as the context, and what of them answers keep."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping

from benchmarks.neighbour.requests import (
    COMPLETIONS,
    Attack,
    Target,
    json_fields,
    repeatedly,
    request_head,
    sent,
)

_NUM_TOKENS, _WIDTH = 4000, 4


def new_prompts(policy: str) -> Attack:
    """Some at a time, each with other tokens at its beginning, so that no cache has any of it."""

    async def attack(target: Target, outcomes: Counter[str]) -> None:
        rest = b",".join(b"%d" % random.randrange(10, 2000) for _ in range(_NUM_TOKENS - 2))
        kept = {} if policy == "full" else {"kv": {"policy": policy, "keep": 0.25}}
        end = b",%b]%b}" % (rest, json_fields(max_tokens=16, **kept))
        numbers = itertools.count()

        async def once() -> None:
            first, second = divmod(next(numbers), 1900)
            start = b'{"model":"%b","prompt":[%d,%d' % (target.model.encode(), 10 + first, 10 + second)
            body = start + end
            head = request_head(target, COMPLETIONS, len(body), more="connection: close\r\n")
            await sent(target, head + body, outcomes)

        await repeatedly(_WIDTH, once)

    return attack


PROMPTS: Mapping[str, Attack] = {
    "new prompts as long as the context": new_prompts("full"),
    "the same, of which snapkv keeps a quarter": new_prompts("snapkv"),
    "the same, of which h2o keeps a quarter": new_prompts("h2o"),
}
