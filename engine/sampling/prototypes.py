"""Matchers at the beginning of their grammars, made beside the steps; every sequence gets a copy.

A copy takes some microseconds; making one takes a millisecond, and for large schemas many times that, while
every stream of the engine would wait. So a request starts only when its grammar is there. Tenants take turns:
who brings many grammars waits for them, and nobody else does.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable

import llguidance

# What is kept: so many, of so many bytes together as they came (a matcher takes some times that).
_MAX_KEPT = 256
_MAX_BYTES = 16 * 1024 * 1024

# Makes a matcher of a payload; may raise.
Build = Callable[[bytes], llguidance.LLMatcher]


class Prototypes:
    """By payload, which is the grammar itself, so nobody's word for a digest is taken."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._lock = threading.Condition()
        # Least recently used first; what was raised stands in place of a matcher.
        self._made: OrderedDict[bytes, llguidance.LLMatcher | Exception] = OrderedDict()
        self._num_bytes = 0
        # Who is to be served next comes first.
        self._wanted: OrderedDict[str, deque[bytes]] = OrderedDict()
        self._queued: set[tuple[str, bytes]] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def is_ready(self, payload: bytes, tenant: str) -> bool:
        """Whether `take` has it without making it; if not, it is made in the tenant's turn."""
        with self._lock:
            if payload in self._made or self._closed:
                return True
            if (tenant, payload) not in self._queued:
                self._queued.add((tenant, payload))
                self._wanted.setdefault(tenant, deque()).append(payload)
                self._start()
                self._lock.notify()
            return False

    def take(self, payload: bytes) -> llguidance.LLMatcher:
        """A matcher of the caller's own. Raises what making it raised."""
        with self._lock:
            made = self._made.get(payload)
            if made is not None:
                self._made.move_to_end(payload)
        if made is None:
            made = self._make(payload)
        if isinstance(made, Exception):
            with self._lock:
                self._drop(payload)
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
            tenant, payload = wanted
            with self._lock:
                done = payload in self._made
            if not done:
                self._make(payload)
            with self._lock:
                self._queued.discard((tenant, payload))

    def _next(self) -> tuple[str, bytes] | None:
        with self._lock:
            self._lock.wait_for(lambda: self._wanted or self._closed)
            if self._closed:
                return None
            tenant, payloads = next(iter(self._wanted.items()))
            payload = payloads.popleft()
            del self._wanted[tenant]
            if payloads:
                self._wanted[tenant] = payloads
            return tenant, payload

    def _make(self, payload: bytes) -> llguidance.LLMatcher | Exception:
        made: llguidance.LLMatcher | Exception
        try:
            made = self._build(payload)
        except Exception as error:
            made = error.with_traceback(None)
        with self._lock:
            self._drop(payload)
            self._made[payload] = made
            self._num_bytes += len(payload)
            while len(self._made) > 1 and (len(self._made) > _MAX_KEPT or self._num_bytes > _MAX_BYTES):
                self._drop(next(iter(self._made)))
        return made

    def _drop(self, payload: bytes) -> None:
        if self._made.pop(payload, None) is not None:
            self._num_bytes -= len(payload)
