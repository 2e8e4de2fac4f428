"""What a request's answer may forget: what it asks for, within its tier's bounds, or what the tier says."""

from __future__ import annotations

from msgspec.structs import replace

from contract.errors import unsupported
from contract.retention import Retention
from gateway.pipeline.validate import refuse
from gateway.tiers import Tier
from gateway.types.request import GenerationRequest


def retained(request: GenerationRequest, tier: Tier) -> GenerationRequest:
    """The request with what it may forget. Raises UNSUPPORTED_FIELD for a policy that the tier does not have,
    and INVALID_ARGUMENT for more than it lets an answer forget.
    """
    own, asked = tier.config.kv, request.retention
    if request.pooling is not None:
        return request
    if asked is None:
        return replace(request, retention=own.default) if own.default.forgets else request
    if asked.policy not in own.policies:
        allowed = ", ".join(own.policies)
        problem = f"tier {tier.name!r} does not have {asked.policy}"
        raise unsupported(request.field("kv.policy"), f"ask for {allowed}, or for another tier", problem)
    _check_bounds(request, asked, tier)
    if not asked.forgets:
        return request
    max_lost = own.max_lost if asked.max_lost is None else asked.max_lost
    return replace(request, retention=replace(asked, max_lost=max_lost, beyond=own.beyond))


def _check_bounds(request: GenerationRequest, asked: Retention, tier: Tier) -> None:
    own = tier.config.kv
    bounds = (
        ("keep", asked.keep, own.min_keep),
        ("window_tokens", asked.window_tokens, own.min_window_tokens),
    )
    for name, value, least in bounds:
        if value is not None and least is not None and value < least:
            problem = f"{value} is less than the {least} that tier {tier.name!r} keeps at least; ask for more"
            raise refuse(request, f"kv.{name}", problem)
    if asked.max_lost is None:
        return
    name = "kv.max_lost"
    if own.max_lost is None:
        problem = f"tier {tier.name!r} does not measure what answers lose"
        raise unsupported(request.field(name), "leave it out, or ask for another tier", problem)
    if asked.max_lost > own.max_lost:
        most = f"the {own.max_lost} that tier {tier.name!r} lets answers lose"
        raise refuse(request, name, f"{asked.max_lost} is more than {most}; ask for less, or leave it out")
