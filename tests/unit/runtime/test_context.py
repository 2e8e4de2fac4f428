"""The signed request context: what was signed is what arrives, or nothing does."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.common.v1 import context_pb2

from contract.errors import MillraceError, Reason
from runtime.context import MAX_CLOCK_SKEW_MS, from_header, sign, to_header, verify

SECRET = b"a secret of this deployment"
NOW_MS = 1_800_000_000_000


def context(issued_unix_ms: int = NOW_MS) -> context_pb2.RequestContext:
    return context_pb2.RequestContext(
        request_id="r-1", tenant="acme", priority=-3, cache_salt=b"\x00\xff", issued_unix_ms=issued_unix_ms
    )


def check(signed: context_pb2.SignedContext, secret: bytes = SECRET) -> context_pb2.RequestContext:
    return verify(signed, secret, now_unix_ms=NOW_MS, max_age_s=60.0)


@given(st.text(max_size=50), st.binary(max_size=50), st.integers(-(2**31), 2**31 - 1))
def test_round_trip_through_the_header(tenant: str, salt: bytes, priority: int) -> None:
    original = context()
    original.tenant, original.cache_salt, original.priority = tenant, salt, priority
    header = to_header(sign(original, SECRET))
    assert header.isascii()
    assert header.isprintable()
    assert check(from_header(header)) == original


@given(st.binary(min_size=1, max_size=200))
def test_signature_is_hmac_sha256(secret: bytes) -> None:
    signed = sign(context(), secret)
    assert signed.signature == hmac.digest(secret, signed.payload, "sha256")


@given(st.integers(min_value=0), st.integers(0, 7))
def test_no_bit_can_be_changed(position: int, bit: int) -> None:
    signed = sign(context(), SECRET)
    payload = bytearray(signed.payload)
    payload[position % len(payload)] ^= 1 << bit
    forged = context_pb2.SignedContext(payload=bytes(payload), signature=signed.signature)
    with pytest.raises(MillraceError) as raised:
        check(forged)
    assert raised.value.reason is Reason.CONTEXT_SIGNATURE_INVALID


def test_another_secret_does_not_verify() -> None:
    with pytest.raises(MillraceError, match="does not match this deployment's secret"):
        check(sign(context(), b"a secret of another deployment"))


@pytest.mark.parametrize(
    ("age_ms", "fresh"),
    [(0, True), (60_000, True), (60_001, False), (-MAX_CLOCK_SKEW_MS, True), (-MAX_CLOCK_SKEW_MS - 1, False)],
)
def test_age_is_limited_both_ways(age_ms: int, fresh: bool) -> None:
    signed = sign(context(NOW_MS - age_ms), SECRET)
    if fresh:
        assert check(signed).tenant == "acme"
    else:
        with pytest.raises(MillraceError, match="old; the limit is 60 s"):
            check(signed)


@pytest.mark.parametrize("header", ["", "!", "AAAA", "ü", "A" * 4096, "forged"])
def test_garbage_in_the_header_is_refused(header: str) -> None:
    with pytest.raises(MillraceError) as raised:
        check(from_header(header))
    assert raised.value.reason is Reason.CONTEXT_SIGNATURE_INVALID


def test_payload_that_is_signed_but_no_context_is_refused() -> None:
    import hashlib
    import hmac

    payload = b"\xff\xff\xff"
    signature = hmac.new(SECRET, payload, hashlib.sha256).digest()
    with pytest.raises(MillraceError, match="cannot be decoded"):
        check(context_pb2.SignedContext(payload=payload, signature=signature))
