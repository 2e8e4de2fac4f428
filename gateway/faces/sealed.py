"""Text that a client keeps for us between two requests: sealed by a key of the deployment, for one tenant."""

from __future__ import annotations

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from contract.errors import invalid

# First byte of what is sealed, and bytes of the nonce (NIST SP 800-38D, section 8.2.2).
_VERSION = b"\x01"
_NONCE_BYTES = 12


class Seal:
    """Seals texts for one `purpose`, by a key derived from the deployment's secret: every gateway opens what
    another has sealed, and nobody else does. AES-256-GCM.
    """

    def __init__(self, secret: bytes, purpose: str) -> None:
        """`secret` is shared by all gateways of the deployment."""
        derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(secret)
        self._cipher = AESGCM(derived)

    def close(self, tenant: str, text: str) -> str:
        """The text, which only the same tenant's requests can open; letters, digits, "-", "_" and "="."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode("utf-8", "surrogatepass"), tenant.encode())
        return urlsafe_b64encode(_VERSION + nonce + sealed).decode()

    def open(self, tenant: str, sealed: str, field: str) -> str:
        """The text; raises INVALID_ARGUMENT below `field` for what was sealed elsewhere, for somebody else,
        or has been damaged.
        """
        try:
            data = urlsafe_b64decode(sealed.encode())
            if data[:1] != _VERSION:
                raise ValueError
            nonce, rest = data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
            return self._cipher.decrypt(nonce, rest, tenant.encode()).decode("utf-8", "surrogatepass")
        except (InvalidTag, ValueError) as error:
            problem = (
                "it was not made here for this tenant, or was changed on the way; send it back as it came"
            )
            raise invalid(field, f"{problem}, or leave it out") from error
