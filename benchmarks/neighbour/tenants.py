"""Two tenants without limits, the key of each, and one that is refused after its first request."""

from __future__ import annotations

import hashlib

KEYS = {"neighbour": "mr-neighbour", "attacker": "mr-attacker"}
REFUSED_KEY = "mr-refused"
CONFIG = "[tiers.standard.test_time]\n" + "".join(
    f"""
[tenants.{tenant}]
{limit}
[[keys.entries]]
id = "{tenant}-1"
tenant = "{tenant}"
hash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"
"""
    for tenant, key, limit in (
        *((name, key, "") for name, key in KEYS.items()),
        ("refused", REFUSED_KEY, "requests_per_minute = 1"),
    )
)
