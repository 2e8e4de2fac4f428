"""Signatures of thoughts, by which a thinking block that comes back is known to be as it was sent."""

from __future__ import annotations

import hashlib

from contract.errors import invalid
from gateway.faces.sealed import Seal

# What the deployment's secret is used for here.
PURPOSE = "thinking blocks"
# Beginning of our signatures, by which those of other servers are told apart.
_OURS = "mr1."
# What a signature has inside: the digest of a thought that is beside it, or one that was not shown.
_SHOWN, _HIDDEN = "shown:", "hidden:"


class Thoughts:
    """Signs and reads the thoughts of one tenant."""

    def __init__(self, seal: Seal, tenant: str) -> None:
        """`seal` is for PURPOSE."""
        self._seal = seal
        self._tenant = tenant

    def sign(self, thought: str, *, shown: bool) -> str:
        """The signature of a block; it carries the thought itself where the block does not show it."""
        inside = f"{_SHOWN}{_digest(thought)}" if shown else f"{_HIDDEN}{thought}"
        return _OURS + self._seal.close(self._tenant, inside)

    def read(self, thinking: str, signature: str, field: str) -> str | None:
        """The thought of a block, None where another server has signed it; raises INVALID_ARGUMENT below
        `field` for a block of ours that was changed, or that another tenant got.
        """
        if not signature.startswith(_OURS):
            return None
        inside = self._seal.open(self._tenant, signature.removeprefix(_OURS), field)
        if inside.startswith(_HIDDEN) and not thinking:
            return inside.removeprefix(_HIDDEN)
        if inside != f"{_SHOWN}{_digest(thinking)}":
            problem = (
                "it is not that of this thinking; send thinking blocks back as they came, or leave them out"
            )
            raise invalid(field, problem)
        return thinking


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
