"""Which service level a request gets: OpenAI's `service_tier`, checked against what its tenant agreed on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from contract.errors import MillraceError, Reason
from gateway.config import TenantConfig, TierConfig
from gateway.settings import OWN_TIER_ALIASES, Settings
from gateway.types.request import Identity

_NO_TENANT = TenantConfig()
# See TierConfig.priority.
_LEAST_PRIORITY = -1000


@dataclass(frozen=True, slots=True)
class Tier:
    """A service level with its name, which answers echo as `service_tier`."""

    name: str
    config: TierConfig

    @property
    def openai_name(self) -> str:
        """What the OpenAI API calls it."""
        return self.config.openai_name or self.name

    @property
    def both_names(self) -> str:
        """The name, and OpenAI's where it is another: a request may have asked for either."""
        return repr(self.name) + ("" if self.openai_name == self.name else f" ({self.openai_name!r})")

    @property
    def accepted(self) -> Tier:
        """The tier under which an accepted request goes on: it is not refused for its wait any more."""
        config = msgspec.structs.replace(self.config, admission="best_effort", queue_limit_ms=None)
        return Tier(self.name, config)


class Tiers:
    """The configured service levels and who may use which."""

    def __init__(self, settings: Settings) -> None:
        self._tiers = {name: Tier(name, config) for name, config in settings.tiers.items()}
        self._own_names = {tier.openai_name: name for name, tier in self._tiers.items()}
        self._tenants = settings.tenants
        self._default = settings.gateway.default_tier

    @property
    def all(self) -> Mapping[str, Tier]:
        """Every tier by its name."""
        return self._tiers

    def named(self, name: str) -> Tier:
        """The tier called `name`; KeyError for an unknown one."""
        return self._tiers[name]

    def own_tier(self, tenant: str) -> str:
        """Name of the tier of a tenant's requests that ask for none."""
        return self._tenants.get(tenant, _NO_TENANT).tier or self._default

    def tenant_weight(self, tenant: str) -> float:
        """Fair-share weight of the tenant inside its tier."""
        return self._tenants.get(tenant, _NO_TENANT).weight

    def allowed(self, identity: Identity) -> tuple[str, ...]:
        """Names that the caller may ask for, the own one first."""
        agreed = self._tenants.get(identity.tenant, _NO_TENANT).allowed_tiers
        return tuple(dict.fromkeys((identity.tier, self.own_tier(identity.tenant), *agreed)))

    def resolve(self, identity: Identity, requested: str) -> Tier:
        """The tier of a request, by its own name or OpenAI's. "" and "auto" give the caller's own, and so
        does "default" where no tier is called so.

        Raises TIER_NOT_ALLOWED for a tier that the tenant may not use, and for one that does not exist: a
        caller does not learn the names of tiers beyond the own ones.
        """
        if identity.in_batch:
            return self._of_batch(requested)
        name = self._own_names.get(requested, requested)
        if not name or name in OWN_TIER_ALIASES:
            name = identity.tier
        if name == identity.tier and name in self._tiers:
            return self._tiers[name]
        allowed = self.allowed(identity)
        if name not in allowed or name not in self._tiers:
            raise MillraceError(
                Reason.TIER_NOT_ALLOWED,
                f"service_tier {requested!r} is not available to tenant {identity.tenant}; "
                f"use one of: {', '.join(self._words(allowed))}",
                field="service_tier",
                metadata={"allowed_tiers": ",".join(allowed)},
            )
        return self._tiers[name]

    @property
    def left_over(self) -> Tier:
        """The tier of batches: the lowest one, behind its other requests, without promises of time, so that
        no line is refused for its wait and none goes to another model.
        """
        lowest = min(self._tiers.values(), key=lambda tier: (tier.config.priority, tier.config.weight))
        config = msgspec.structs.replace(
            lowest.accepted.config,
            priority=max(_LEAST_PRIORITY, lowest.config.priority - 1),
            ttft_target_ms=None,
            tpot_target_ms=None,
            fallback={},
        )
        return Tier(lowest.name, config)

    def _of_batch(self, requested: str) -> Tier:
        tier = self.left_over
        if requested and requested not in {tier.name, tier.openai_name, "flex", *OWN_TIER_ALIASES}:
            raise MillraceError(
                Reason.TIER_NOT_ALLOWED,
                f"service_tier {requested!r}: lines of a batch run under {tier.name!r}; leave it out",
                field="service_tier",
                metadata={"allowed_tiers": tier.name},
            )
        return tier

    def _words(self, allowed: Iterable[str]) -> dict[str, None]:
        """Values of `service_tier` that lead to one of these tiers."""
        aliases = sorted(OWN_TIER_ALIASES - self._own_names.keys())
        named = [self._tiers[name].openai_name for name in allowed if name in self._tiers]
        return dict.fromkeys((*aliases, *allowed, *named))
