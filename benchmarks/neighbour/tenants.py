"""Two tenants without limits, and the key of each."""

from __future__ import annotations

import hashlib

KEYS = {"neighbour": "mr-neighbour", "attacker": "mr-attacker"}
CONFIG = "".join(
    f"""
[tenants.{tenant}]
[[keys.entries]]
id = "{tenant}-1"
tenant = "{tenant}"
hash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"
"""
    for tenant, key in KEYS.items()
)
