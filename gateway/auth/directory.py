"""Who a credential belongs to, and what was agreed with them. Read by every request, replaced as a whole."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from contract.errors import MillraceError, Reason
from gateway.auth.secret import KEY_PREFIX
from gateway.config import KeyEntry, LimitValues, TenantConfig
from gateway.settings import Settings

DEVELOPMENT_KEY_ID = "development"
_UNLIMITED = LimitValues()
# No model has an empty name.
_NO_MODEL = ("",)
_HASH_PREFIX = "sha256:"
_SALT_BYTES = 16
# A token of an identity provider begins with its header, an object of JSON in base64.
_TOKEN_PREFIX = "eyJ"
# Subjects are their issuer's words, of any length, with any characters; the ledger and headers have limits.
_TOKEN_KEY_PREFIX = "jwt:"
_MAX_KEY_ID = 128
_DIGEST_DIGITS = 16
# As Envoy has it, which verifies tokens.
_CLOCK_SKEW_S = 60
_CONTROL_CHARACTERS = dict.fromkeys([*range(32), *range(127, 160)])


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    tenant: str
    key_id: str
    tier: str
    # Empty allows every model.
    allowed_models: tuple[str, ...]
    # Separates prefix-cache entries between tenants.
    cache_salt: bytes


@dataclass(frozen=True, slots=True)
class _Key:
    entry: KeyEntry
    principal: Principal


@dataclass(frozen=True, slots=True)
class _Snapshot:
    by_hash: Mapping[str, _Key]
    limits_by_id: Mapping[str, LimitValues]


def hash_key(secret: str) -> str:
    """The form in which keys are stored: "sha256:" and lower-case hex."""
    return _HASH_PREFIX + hashlib.sha256(secret.encode()).hexdigest()


class KeyDirectory:
    """API keys and JWT claims to principals; limits of tenants and keys.

    A key is found by its SHA-256, so that neither a stolen file nor the timing of a lookup gives a key away.
    Safe for readers on any thread while `replace_stored` runs: they see the old keys or the new ones.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._secret = settings.security.secret()
        self._tenant_limits = {name: tenant.limits for name, tenant in settings.tenants.items()}
        self._claims = settings.keys.jwt
        self._snapshot = self._build(())

    def replace_stored(self, entries: Iterable[KeyEntry]) -> None:
        """Sets the keys that come from the key store; those of the configuration file win over them."""
        self._snapshot = self._build(entries)

    def authenticate(self, secret: str) -> Principal:
        """The caller with this API key; raises INVALID_CREDENTIALS or TIER_NOT_ALLOWED."""
        key = self._snapshot.by_hash.get(hash_key(secret))
        if key is None and self._claims.issuer and secret.startswith(_TOKEN_PREFIX):
            # Envoy has not verified it: then it would have sent its claims.
            raise _invalid(
                f"the token was not accepted: it has expired or is not valid yet, its issuer is not "
                f"{self._claims.issuer!r}, its audience is another one, or its signature does not fit the "
                "issuer's keys; get a new token"
            )
        if key is None:
            raise _invalid(
                f"the API key is not known; keys of this deployment begin with {KEY_PREFIX!r} and are made "
                "with `millrace keys create`"
            )
        entry = key.entry
        if entry.disabled:
            raise _invalid(f"the API key {entry.id} is revoked; use another one")
        if entry.expires_unix_s is not None and self._clock() >= entry.expires_unix_s:
            raise _invalid(f"the API key {entry.id} has expired; use another one")
        if not self._may_use(entry.tenant, key.principal.tier):
            # The key was stored while its tenant had this tier, which the configuration has taken away since.
            raise MillraceError(
                Reason.TIER_NOT_ALLOWED,
                f"the API key {entry.id} is of tier {entry.tier!r}, which tenant {entry.tenant} may not use; "
                f"add it to tenants.{entry.tenant}.allowed_tiers, or make another key",
            )
        return key.principal

    def _may_use(self, tenant: str, tier: str) -> bool:
        config = self._settings.tenants[tenant]
        return tier in {config.tier or self._settings.gateway.default_tier, *config.allowed_tiers}

    def principal_of_claims(self, claims: Mapping[str, Any]) -> Principal:
        """The caller with these verified JWT claims.

        Raises TENANT_NOT_ALLOWED or TIER_NOT_ALLOWED, and INVALID_CREDENTIALS where no issuer is configured:
        then nobody can have verified anything; and for a token that has expired since it was verified, which
        happens on connections of many requests.
        """
        if not self._claims.issuer:
            raise MillraceError(
                Reason.INVALID_CREDENTIALS,
                "this deployment takes no tokens of an identity provider; send an API key, or configure "
                "[keys.jwt]",
            )
        expires = claims.get("exp")
        if isinstance(expires, int | float) and self._clock() >= expires + _CLOCK_SKEW_S:
            raise _invalid("the token has expired; connect again with a new one")
        claimed = str(claims.get(self._claims.tenant_claim, ""))
        tenant = self._claims.tenants.get(claimed, claimed)
        config = self._settings.tenants.get(tenant)
        if config is None:
            raise MillraceError(
                Reason.TENANT_NOT_ALLOWED,
                f"the token's claim {self._claims.tenant_claim!r} is {claimed!r}, which is no tenant of this "
                "deployment; add it to [tenants] or map it in [keys.jwt.tenants]",
                metadata={"claim": self._claims.tenant_claim},
            )
        tier = str(claims.get(self._claims.tier_claim, "")) if self._claims.tier_claim else ""
        own = config.tier or self._settings.gateway.default_tier
        if tier and not self._may_use(tenant, tier):
            raise MillraceError(
                Reason.TIER_NOT_ALLOWED,
                f"the token's claim {self._claims.tier_claim!r} asks for tier {tier!r}, which tenant "
                f"{tenant} may not use; add it to tenants.{tenant}.allowed_tiers",
            )
        return self._principal(tenant, config, _token_key_id(str(claims.get("sub", ""))), tier or own, ())

    def tenant_limits(self, tenant: str) -> LimitValues:
        """See LimitDirectory."""
        return self._tenant_limits.get(tenant, _UNLIMITED)

    def key_limits(self, key_id: str) -> LimitValues:
        """See LimitDirectory."""
        return self._snapshot.limits_by_id.get(key_id, _UNLIMITED)

    def _build(self, stored: Iterable[KeyEntry]) -> _Snapshot:
        keys = self._settings.keys
        configured = list(keys.entries)
        if keys.development_hash:
            configured.append(
                KeyEntry(id=DEVELOPMENT_KEY_ID, tenant=keys.development_tenant, hash=keys.development_hash)
            )
        names = {entry.id for entry in configured}
        # While a key is rotated, it has two secrets under one id.
        entries = [*(entry for entry in stored if entry.id not in names), *configured]
        by_hash: dict[str, _Key] = {}
        for entry in entries:
            tenant = self._settings.tenants.get(entry.tenant)
            # A stored key outlives its tenant; until the tenant is back, it is not known.
            if tenant is not None:
                by_hash[entry.hash] = _Key(entry, self._principal_of_key(entry, tenant))
        limits = {entry.id: entry.limits for entry in entries if entry.limits != _UNLIMITED}
        return _Snapshot(by_hash, limits)

    def _principal_of_key(self, entry: KeyEntry, tenant: TenantConfig) -> Principal:
        tier = entry.tier or tenant.tier or self._settings.gateway.default_tier
        return self._principal(entry.tenant, tenant, entry.id, tier, entry.allowed_models)

    def _principal(
        self, name: str, tenant: TenantConfig, key_id: str, tier: str, models: tuple[str, ...]
    ) -> Principal:
        allowed = tenant.allowed_models
        if models:
            # Where nothing is left, nothing may be used: an empty tuple would allow everything.
            allowed = tuple(model for model in models if not allowed or model in allowed) or _NO_MODEL
        salt = b""
        if not tenant.cache_shared:
            salt = hmac.digest(self._secret, b"cache-salt:" + name.encode(), "sha256")[:_SALT_BYTES]
        return Principal(name, key_id, tier, allowed, salt)


def _token_key_id(subject: str) -> str:
    """Public name of a token's subject; one that had to be changed is told apart by its digest."""
    plain = subject.translate(_CONTROL_CHARACTERS)
    if plain == subject and len(_TOKEN_KEY_PREFIX + subject) <= _MAX_KEY_ID:
        return _TOKEN_KEY_PREFIX + subject
    digest = "~" + hashlib.sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
    return (_TOKEN_KEY_PREFIX + plain)[: _MAX_KEY_ID - len(digest)] + digest


def _invalid(message: str) -> MillraceError:
    return MillraceError(Reason.INVALID_CREDENTIALS, message)
