"""Encrypts what is stored: AES-256-GCM by a key of the deployment, bound to the place that it stands at."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_NAME_BYTES = 4
_NONCE_BYTES = 12
# Bytes that a sealed text is longer than a plain one.
OVERHEAD_BYTES = _NAME_BYTES + _NONCE_BYTES + 16


class SealBroken(Exception):
    """What is stored was written with a key that is not here, was altered, or stands elsewhere."""


class RowSeal:
    """Seals with the first key, and opens what any of them has sealed."""

    def __init__(
        self, keys: Sequence[str], *, what: str = "stored state", setting: str = "gateway.store.key_file"
    ) -> None:
        """`keys` are texts of any form; what encrypts is derived from them by HKDF (RFC 5869), another key
        for whatever is named otherwise by `what`. `setting` is named where a key is missing.
        """
        self._what, self._setting = what, setting
        info = f"millrace {what}".encode()
        derived = [HKDF(SHA256(), 32, salt=None, info=info).derive(key.encode()) for key in keys]
        self._ciphers = {_name(key): AESGCM(key) for key in derived}
        self._first = _name(derived[0])

    def seal(self, place: str, plain: bytes) -> bytes:
        """The key's name, nonce and ciphertext, readable at `place` alone."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return self._first + nonce + self._ciphers[self._first].encrypt(nonce, plain, place.encode())

    def open(self, place: str, sealed: bytes) -> bytes:
        """What was sealed for `place`; raises SealBroken."""
        cipher = self._ciphers.get(sealed[:_NAME_BYTES])
        if cipher is None:
            raise SealBroken(
                f"{self._what} was written with a key that {self._setting} does not have; "
                "add the old key on a line below the new one"
            )
        nonce, text = sealed[_NAME_BYTES : _NAME_BYTES + _NONCE_BYTES], sealed[_NAME_BYTES + _NONCE_BYTES :]
        try:
            return cipher.decrypt(nonce, text, place.encode())
        except (InvalidTag, ValueError) as error:
            raise SealBroken(f"a piece of {self._what} was altered, cut, or belongs elsewhere") from error


def _name(key: bytes) -> bytes:
    return hashlib.sha256(b"name" + key).digest()[:_NAME_BYTES]
