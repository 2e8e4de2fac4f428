"""A cheaper model for what a model would refuse for its load, where the tier names one and the request allows
it: attempts in a row, of which the first that an engine works on answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from contract.chat import TokenPrompt
from contract.errors import MillraceError, Reason
from gateway.models.catalog import Catalog, Target
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.call import Call
from gateway.settings import ANY_MODEL
from gateway.types.request import GenerationRequest

_OVERLOAD = frozenset({Reason.QUEUE_LIMIT_EXCEEDED, Reason.ENGINE_UNAVAILABLE, Reason.DRAINING})


def is_overload(error: MillraceError) -> bool:
    """Whether another model may have room where this one has none."""
    # A field at fault is one everywhere.
    return error.reason in _OVERLOAD and not error.field


async def in_a_row(open_first: Open, open_other: Open) -> tuple[Attempt, MillraceError | None]:
    """The attempt that answers, and what the first one was refused with where it is the other.

    Where both are refused, what the first one said is told: by what is raised, or by the attempt that is
    returned. What is left behind is closed.
    """
    first, refusal = await _tried(open_first)
    if refusal is None:
        assert first is not None, "an attempt is open, or was refused"
        return first, None
    if not is_overload(refusal):
        return _as_refused(first, refusal), None
    if first is not None:
        await first.let_go()
    try:
        other, again = await _tried(open_other, waits=first is not None)
    except BaseException as error:
        if first is not None:
            await first.close(error)
        raise
    if other is None or again is not None:
        if other is not None:
            other.supersede()
            await other.let_go()
        return _as_refused(first, refusal), None
    if first is not None:
        first.supersede()
    return other, refusal


# Opens an attempt, or raises why there is none.
Open: TypeAlias = Callable[[], Awaitable[Attempt]]


async def _tried(open_attempt: Open, *, waits: bool = True) -> tuple[Attempt | None, MillraceError | None]:
    """An attempt, and why no engine works on it; it is waited for that only where it `waits`."""
    try:
        attempt = await open_attempt()
    except MillraceError as error:
        return None, error
    try:
        return attempt, await attempt.refusal() if waits else None
    except BaseException as error:
        await attempt.close(error)
        raise


def _as_refused(attempt: Attempt | None, refusal: MillraceError) -> Attempt:
    if attempt is None:
        raise refusal
    return attempt


def cheaper(catalog: Catalog, call: Call, target: Target) -> Target | None:
    """The model that answers instead; None where there is none, or the caller may not use it."""
    request, names = call.request, call.tier.config.fallback
    if not names or not request.allow_fallback or target.adapter:
        return None
    name = names.get(target.served.name) or names.get(ANY_MODEL)
    if name is None or name in target.served.config.names:
        return None
    try:
        found = catalog.resolve(call.caller.identity, name, tier=call.tier.name)
    except MillraceError:
        return None
    is_alike = found.served.vocabulary.fingerprint == target.served.vocabulary.fingerprint
    return found if is_alike or not _has_ids(request) else None


def _has_ids(request: GenerationRequest) -> bool:
    sampling = request.sampling
    given = (sampling.logit_bias, sampling.allowed_token_ids, sampling.stop_token_ids)
    return isinstance(request.prompt, TokenPrompt) or any(given)
