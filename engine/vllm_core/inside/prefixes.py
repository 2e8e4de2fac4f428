"""vLLM's cache events under the block hashes that gateways compute.

The hashes are those of `contract.prefix`, which is laid beside this package. vLLM
reports the tokens of a block that it stores, and later only its own hash; so its hashes are kept with ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from contract.prefix import block_hash, event_hash, root_hash


class CorePrefixes:
    """What vLLM holds, by its hashes. Takes its events, gives ours as plain data."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._ours: dict[Any, bytes] = {}
        # vLLM may hold the same block several times, and reports each.
        self._copies: Counter[Any] = Counter()

    def take(self, events: Iterable[Any]) -> list[dict[str, Any]]:
        """Events of one message in their order. Only the first group of layers counts."""
        reported: list[dict[str, Any]] = []
        for event in events:
            if getattr(event, "group_idx", None) not in (None, 0):
                continue
            kind = type(event).__name__
            if kind == "BlockStored":
                reported += self._stored(event)
            elif kind == "BlockRemoved":
                reported += self._removed(event.block_hashes)
            elif kind == "AllBlocksCleared":
                self._copies.clear()
                reported += self._removed(list(self._ours))
        return reported

    def _stored(self, event: Any) -> list[dict[str, Any]]:
        if event.parent_block_hash is None:
            parent, parent_hash = self._root(event), 0
        elif event.parent_block_hash in self._ours:
            parent = self._ours[event.parent_block_hash]
            parent_hash = event_hash(parent)
        else:
            return []
        hashes = []
        for index, theirs in enumerate(event.block_hashes):
            tokens = event.token_ids[index * event.block_size : (index + 1) * event.block_size]
            parent = block_hash(parent, tokens)
            self._ours[theirs] = parent
            self._copies[theirs] += 1
            hashes.append(event_hash(parent))
        if all(self._copies[theirs] > 1 for theirs in event.block_hashes):
            return []
        return [{"type": "stored", "block_hashes": hashes, "parent_hash": parent_hash}]

    def _root(self, event: Any) -> bytes:
        extra = (event.extra_keys or [None])[0] or ()
        adapter = event.lora_name or ""
        salts = [each for each in extra if isinstance(each, str) and each != adapter]
        return root_hash(self._model, adapter, bytes.fromhex(salts[0]) if salts else b"")

    def _removed(self, hashes: Iterable[Any]) -> list[dict[str, Any]]:
        gone = []
        for each in hashes:
            self._copies[each] -= 1
            if self._copies[each] <= 0:
                del self._copies[each]
                gone += [self._ours.pop(each)] if each in self._ours else []
        return [{"type": "evicted", "block_hashes": [event_hash(each) for each in gone]}] if gone else []
