"""Who a credential belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import MillraceError, Reason
from gateway.auth.directory import KeyDirectory, hash_key
from gateway.config import KeyEntry
from gateway.settings import load_settings


def directory(clock: float = 1000.0, **tables: Any) -> KeyDirectory:
    base: dict[str, Any] = {
        "security": {"context_secret": "a secret for unit tests"},
        "tiers": {"standard": {}, "gold": {}},
        "tenants": {
            "acme": {"tier": "gold", "allowed_tiers": ["standard"], "allowed_models": ["a", "b"]},
            "shared": {"cache_shared": True},
        },
        "keys": {
            "entries": [
                {"id": "plain", "tenant": "acme", "hash": hash_key("mr-plain")},
                {
                    "id": "narrow",
                    "tenant": "acme",
                    "hash": hash_key("mr-narrow"),
                    "tier": "standard",
                    "allowed_models": ["b", "c"],
                    "requests_per_minute": 5,
                },
                {"id": "old", "tenant": "acme", "hash": hash_key("mr-old"), "expires_unix_s": 1000},
                {"id": "off", "tenant": "shared", "hash": hash_key("mr-off"), "disabled": True},
            ],
            "jwt": {
                "issuer": "https://id.example",
                "jwks_file": "/keys.json",
                "tier_claim": "plan",
                "tenants": {"org-7": "acme"},
            },
        },
    }
    return KeyDirectory(load_settings({**base, **tables}), clock=lambda: clock)


def reason(call: Any, *arguments: Any) -> Reason:
    with pytest.raises(MillraceError) as caught:
        call(*arguments)
    return caught.value.reason


def test_key_has_the_tier_and_models_of_its_tenant() -> None:
    principal = directory().authenticate("mr-plain")
    assert (principal.tenant, principal.key_id, principal.tier) == ("acme", "plain", "gold")
    assert principal.allowed_models == ("a", "b")


def test_key_can_narrow_but_not_widen() -> None:
    principal = directory().authenticate("mr-narrow")
    assert (principal.tier, principal.allowed_models) == ("standard", ("b",))
    assert directory().key_limits("narrow").requests_per_minute == 5


def test_a_key_for_none_of_its_tenants_models_may_use_none() -> None:
    found = directory()
    # Empty would mean all.
    found.replace_stored([KeyEntry(id="o", tenant="acme", hash=hash_key("mr-o"), allowed_models=("other",))])
    allowed = found.authenticate("mr-o").allowed_models
    assert allowed
    assert not {"a", "b", "other"} & set(allowed)


@pytest.mark.parametrize("secret", ["", "mr-unknown", "mr-old", "mr-off", hash_key("mr-plain")])
def test_unknown_expired_and_revoked_keys_are_refused(secret: str) -> None:
    assert reason(directory().authenticate, secret) is Reason.INVALID_CREDENTIALS


def test_key_expires_at_its_moment() -> None:
    assert directory(clock=999.9).authenticate("mr-old").key_id == "old"


def test_prefix_caches_are_apart_unless_shared() -> None:
    found = directory()
    stored = [KeyEntry(id="s", tenant="shared", hash=hash_key("mr-s"))]
    found.replace_stored(stored)
    acme = found.authenticate("mr-plain").cache_salt
    assert len(acme) == 16
    assert found.authenticate("mr-narrow").cache_salt == acme
    assert found.authenticate("mr-s").cache_salt == b""


def test_stored_keys_come_and_go_and_the_file_wins() -> None:
    found = directory()
    found.replace_stored(
        [
            KeyEntry(id="new", tenant="acme", hash=hash_key("mr-new"), tokens_per_minute=7),
            KeyEntry(id="plain", tenant="shared", hash=hash_key("mr-usurper")),
            KeyEntry(id="orphan", tenant="nobody", hash=hash_key("mr-orphan")),
        ]
    )
    assert found.authenticate("mr-new").key_id == "new"
    assert found.key_limits("new").tokens_per_minute == 7
    assert found.authenticate("mr-plain").tenant == "acme"
    for secret in ("mr-usurper", "mr-orphan"):
        assert reason(found.authenticate, secret) is Reason.INVALID_CREDENTIALS
    found.replace_stored([])
    assert reason(found.authenticate, "mr-new") is Reason.INVALID_CREDENTIALS
    assert found.key_limits("new").tokens_per_minute is None


def test_claims_name_tenant_and_tier() -> None:
    principal = directory().principal_of_claims({"sub": "u1", "tenant": "org-7", "plan": "standard"})
    assert (principal.tenant, principal.key_id, principal.tier) == ("acme", "jwt:u1", "standard")
    assert directory().principal_of_claims({"tenant": "shared"}).tier == "standard"


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({}, Reason.TENANT_NOT_ALLOWED),
        ({"tenant": "nobody"}, Reason.TENANT_NOT_ALLOWED),
        ({"tenant": "shared", "plan": "gold"}, Reason.TIER_NOT_ALLOWED),
    ],
)
def test_claims_beyond_the_agreement_are_refused(claims: dict[str, str], expected: Reason) -> None:
    assert reason(directory().principal_of_claims, claims) is expected


def test_development_key_belongs_to_a_tenant_of_its_own() -> None:
    found = directory(keys={"development_hash": hash_key("mr-dev-local")})
    principal = found.authenticate("mr-dev-local")
    assert (principal.tenant, principal.tier, principal.allowed_models) == ("development", "standard", ())


def test_claims_of_a_token_end_with_it() -> None:
    claims = {"sub": "u1", "tenant": "org-7", "exp": 940}
    assert directory(clock=999.9).principal_of_claims(claims).tenant
    assert reason(directory(clock=1000.0).principal_of_claims, claims) is Reason.INVALID_CREDENTIALS


def test_subject_of_a_token_has_a_bounded_printable_name() -> None:
    def key_id(subject: str) -> str:
        return directory().principal_of_claims({"sub": subject, "tenant": "org-7"}).key_id

    assert key_id("müller") == "jwt:müller"
    assert key_id("s" * 124) == "jwt:" + "s" * 124
    names = [key_id(subject) for subject in ("s" * 125, "s" * 126, "s\0", "s\r\n", "s")]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 128 and name.isprintable() for name in names)


def test_token_that_was_not_verified_is_not_called_an_unknown_key() -> None:
    token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJtZSJ9.c2lnbmF0dXJl"
    with pytest.raises(MillraceError, match=r"token was not accepted: it has expired.*'https://id\.example'"):
        directory().authenticate(token)
    with pytest.raises(MillraceError, match="API key is not known"):
        directory(keys={}).authenticate(token)


def test_stored_key_of_a_tier_that_its_tenant_lost_is_told_so() -> None:
    keys = directory()
    stored = (("gone", "mr-1", "platinum"), ("lost", "mr-2", "gold"), ("own", "mr-3", ""))
    keys.replace_stored(
        [KeyEntry(id=id_, tenant="shared", hash=hash_key(key), tier=tier) for id_, key, tier in stored]
    )
    for _, key, tier in stored[:2]:
        with pytest.raises(MillraceError, match=f"tier '{tier}', which tenant shared may not use") as caught:
            keys.authenticate(key)
        assert caught.value.reason is Reason.TIER_NOT_ALLOWED
    assert keys.authenticate("mr-3").tier == "standard"
