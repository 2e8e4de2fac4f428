"""A step's own keys in a native program whose caches round them by channel: attention reads them whole, also
that of later layers which have the same cache. ProgramBuilder asks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.model.records import Attention, Floats
from kernels.native.library import NativeLibrary, Op
from kernels.paged_cache.host import BY_CHANNEL
from kernels.paged_cache.native import Storage, key_group_ops


class OwnKeys:
    """Of the layers of one program. What is kept for the next step is written when no layer reads what was
    kept before: behind the last one, where several have one cache.
    """

    def __init__(self, library: NativeLibrary, *, copies_slots: bool) -> None:
        self._library, self._copies_slots = library, copies_slots
        self._read_again: set[int] = set()
        # Rows [T, K * D] of a layer's keys, by its cache.
        self._rows: dict[int, Floats] = {}
        self._last: list[Op] = []

    def know(self, caches: Sequence[Storage]) -> None:
        """The caches of all layers, some of which have the same."""
        rounded = (id(each) for each in caches if getattr(each, "type_name", None) == BY_CHANNEL)
        self._read_again = {each for each, count in Counter(rounded).items() if count > 1}

    def room(self, attention: Attention, cache: Storage) -> str:
        """The name of the buffer for what is projected: keys that are read again have one for themselves."""
        return f"qkv {id(cache)}" if attention.stores and id(cache) in self._read_again else "qkv"

    def around(
        self, attention: Attention, cache: Storage, qkv: Floats, step: int
    ) -> tuple[Floats, list[Op], list[Op]]:
        """Rows of keys that a layer's attention reads, and the ops before it and behind it; `step` is an
        address.
        """
        if cache.type_name != BY_CHANNEL:
            return qkv[:, attention.sizes[0] :], [], []
        if not attention.stores:
            return self._rows[id(cache)], [], []
        self._rows[id(cache)] = keys = qkv[:, attention.sizes[0] :]
        before, behind = key_group_ops(self._library, step, cache, keys, copies_slots=self._copies_slots)
        if id(cache) in self._read_again:
            self._last += behind
            behind = []
        return keys, before, behind

    def rest(self) -> list[Op]:
        """Ops that come behind all layers; once."""
        found, self._last = self._last, []
        return found
