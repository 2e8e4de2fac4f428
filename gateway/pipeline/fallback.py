"""A cheaper model for what a model would refuse for its load, where the tier names one and the request allows
it.
"""

from __future__ import annotations

from contract.chat import TokenPrompt
from contract.errors import MillraceError, Reason
from gateway.models.catalog import Catalog, Target
from gateway.pipeline.call import Call
from gateway.settings import ANY_MODEL
from gateway.types.request import GenerationRequest

_OVERLOAD = frozenset({Reason.QUEUE_LIMIT_EXCEEDED, Reason.ENGINE_UNAVAILABLE, Reason.DRAINING})


def is_overload(error: MillraceError) -> bool:
    """Whether another model may have room where this one has none."""
    # A field at fault is one everywhere.
    return error.reason in _OVERLOAD and not error.field


def cheaper(catalog: Catalog, call: Call) -> Target | None:
    """The model that answers instead; None where there is none, or the caller may not use it."""
    request, target, names = call.request, call.target, call.tier.config.fallback
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
