"""What engines computed for a gateway that is gone, beyond what it sent: in the books, and charged to nobody.

Engines say it to every other gateway: how much there was of each request. How much of that was sent is in the
row that the journal leaves; whoever finds that row writes the difference, so it counts once however many do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from sqlalchemy import Engine, bindparam, select, update

from gateway.ledger.tables import REQUESTS
from gateway.pipeline.ports import INTERRUPTED

# How long a row is looked for: most were written by a gateway that has sent everything, and never come.
_KEPT_S = 120.0
# Most parameters in one statement; databases have limits.
_MAX_PARAMETERS = 1000

_C = REQUESTS.c
_TOLD = _C.completion_tokens + _C.candidate_tokens
_WRITE = (
    update(REQUESTS)
    .where(_C.entry_id == bindparam("entry"), _C.unclaimed_tokens < bindparam("num_tokens"))
    .values(unclaimed_tokens=bindparam("num_tokens"))
)


class UnclaimedTokens:
    """Reports of engines whose rows have not been found. The event loop notes, a thread writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Tokens by entry, and until when the entry's row is looked for, in monotonic seconds.
        self._waiting: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def note(self, computed: Mapping[str, int]) -> None:
        """So many tokens were generated for these entries, says an engine."""
        until_s = time.monotonic() + _KEPT_S
        with self._lock:
            for entry_id, num_tokens in computed.items():
                # Several engines have had it one after another: the last one counts the tokens of the others.
                known, _ = self._waiting.get(entry_id, (0, 0.0))
                self._waiting[entry_id] = (max(known, num_tokens), until_s)

    def write(self) -> None:
        """Writes what nobody was sent of the requests whose rows are there; raises SQLAlchemyError."""
        now_s = time.monotonic()
        with self._lock:
            waiting = {entry_id: each for entry_id, each in self._waiting.items() if each[1] > now_s}
            self._waiting = dict(waiting)
        ids = list(waiting)
        for first in range(0, len(ids), _MAX_PARAMETERS):
            with self._engine.begin() as connection:
                query = select(_C.entry_id, _TOLD).where(
                    _C.entry_id.in_(ids[first : first + _MAX_PARAMETERS]), _C.outcome == INTERRUPTED
                )
                sent: dict[str, int] = {each[0]: each[1] for each in connection.execute(query)}
                rows = [{"entry": each, "num_tokens": waiting[each][0] - sent[each]} for each in sent]
                if rows:
                    connection.execute(_WRITE, rows)
            self._forget({each: waiting[each] for each in sent})

    def _forget(self, written: Mapping[str, tuple[int, float]]) -> None:
        with self._lock:
            for entry_id, each in written.items():
                if self._waiting.get(entry_id) == each:
                    del self._waiting[entry_id]
