"""Weights are kept, and whoever had a model keeps it."""

from __future__ import annotations

from collections import Counter

from gateway.models.routes import pick, sticky_key

KEYS = [sticky_key("acme", str(number)) for number in range(10_000)]


def test_the_shares_of_ten_thousand_requests_are_those_of_the_weights_within_one_per_cent() -> None:
    weights = {"chat@1": 85.0, "chat@2": 10.0, "chat@3": 5.0, "off": 0.0}
    counts = Counter(pick("chat", key, weights.items()) for key in KEYS)
    assert counts["off"] == 0
    for name, weight in weights.items():
        assert abs(counts[name] / len(KEYS) - weight / 100) < 0.01


def test_a_key_keeps_its_model_and_a_changed_weight_moves_no_more_than_it_must() -> None:
    before = [pick("chat", key, [("a", 95), ("b", 5)]) for key in KEYS]
    assert before == [pick("chat", key, [("b", 5), ("a", 95)]) for key in KEYS]
    after = [pick("chat", key, [("a", 90), ("b", 10)]) for key in KEYS]
    # Nobody who had the canary loses it.
    assert all(new == "b" for old, new in zip(before, after, strict=True) if old == "b")
    assert 0.04 < sum(old != new for old, new in zip(before, after, strict=True)) / len(KEYS) < 0.06


def test_tenants_do_not_share_what_their_keys_lead_to() -> None:
    weights = [("a", 50), ("b", 50)]
    mine = [pick("chat", sticky_key("acme", str(number)), weights) for number in range(200)]
    theirs = [pick("chat", sticky_key("other", str(number)), weights) for number in range(200)]
    assert mine != theirs
