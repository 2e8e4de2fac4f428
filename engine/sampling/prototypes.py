"""Matchers at the beginning of their grammars, made beside the steps; every sequence gets a copy.

A copy takes some microseconds; making one takes a millisecond, and for large schemas many times that, while
every stream of the engine would wait. So a request starts only when its grammar is there. Tenants take turns:
who brings many grammars waits for them, and nobody else does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeAlias

import llguidance

# Prototypes that are kept, and the bytes of their payloads together (a matcher takes some times that).
_MAX_KEPT = 256
_MAX_BYTES = 16 * 1024 * 1024

# Makes a matcher of a payload; may raise.
Build = Callable[[bytes], llguidance.LLMatcher]


# A grammar is known by its digest and payload.
_Key: TypeAlias = tuple[str, bytes]


class Prototypes:
    """By payload, which is the grammar itself, so nobody's word for a digest is taken; and by digest, in
    which the tokenizer service tells tenants apart that must not learn of each other by time.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._lock = threading.Condition()
        # Least recently used first; what was raised stands in place of a matcher.
        self._made: OrderedDict[_Key, llguidance.LLMatcher | Exception] = OrderedDict()
        self._num_bytes = 0
        # Tenants in the order in which they are served.
        self._wanted: OrderedDict[str, deque[_Key]] = OrderedDict()
        self._queued: set[tuple[str, _Key]] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def is_ready(self, payload: bytes, tenant: str, digest: str = "") -> bool:
        """Whether `take` has it without making it; if not, it is made in the tenant's turn."""
        key = (digest, payload)
        with self._lock:
            if key in self._made or self._closed:
                return True
            if (tenant, key) not in self._queued:
                self._queued.add((tenant, key))
                self._wanted.setdefault(tenant, deque()).append(key)
                self._start()
                self._lock.notify()
            return False

    def take(self, payload: bytes, digest: str = "") -> llguidance.LLMatcher:
        """A matcher of the caller's own. Raises what making it raised."""
        key = (digest, payload)
        with self._lock:
            made = self._made.get(key)
            if made is not None:
                self._made.move_to_end(key)
        if made is None:
            made = self._make(key)
        if isinstance(made, Exception):
            with self._lock:
                self._drop(key)
            try:
                raise made
            finally:
                # This frame and the error would keep each other.
                del made
        return made.deep_copy()

    def close(self) -> None:
        """Ends the thread; what is wanted is not made any more."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-prototypes", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            tenant, key = wanted
            with self._lock:
                done = key in self._made
            if not done:
                self._make(key)
            with self._lock:
                self._queued.discard((tenant, key))

    def _next(self) -> tuple[str, _Key] | None:
        with self._lock:
            self._lock.wait_for(lambda: self._wanted or self._closed)
            if self._closed:
                return None
            tenant, keys = next(iter(self._wanted.items()))
            key = keys.popleft()
            del self._wanted[tenant]
            if keys:
                self._wanted[tenant] = keys
            return tenant, key

    def _make(self, key: _Key) -> llguidance.LLMatcher | Exception:
        payload = key[1]
        made: llguidance.LLMatcher | Exception
        try:
            made = self._build(payload)
        except Exception as error:
            made = error.with_traceback(None)
        with self._lock:
            self._drop(key)
            self._made[key] = made
            self._num_bytes += len(payload)
            while len(self._made) > 1 and (len(self._made) > _MAX_KEPT or self._num_bytes > _MAX_BYTES):
                self._drop(next(iter(self._made)))
        return made

    def _drop(self, key: _Key) -> None:
        if self._made.pop(key, None) is not None:
            self._num_bytes -= len(key[1])
