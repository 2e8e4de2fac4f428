"""A peer that says nothing counts as dead."""

from __future__ import annotations

import asyncio

# Silence is counted in turns of whoever listens: one that stood still itself has missed nothing.
TURNS = 8


class Silence:
    """Notices that a peer has said nothing for `limit_s` seconds. Use from one event loop."""

    def __init__(self, limit_s: float) -> None:
        self.turn_s = limit_s / TURNS
        self.num_turns = 0

    def heard(self) -> None:
        """The peer has said something."""
        self.num_turns = 0

    async def lasts(self) -> str:
        """Returns when the peer counts as dead, with why."""
        self.num_turns = 0
        while True:
            await asyncio.sleep(self.turn_s)
            self.num_turns += 1
            if self.is_dead():
                return f"it said nothing for {self.num_turns * self.turn_s:.3g} s"

    def is_dead(self) -> bool:
        """Asked after every turn of silence."""
        return self.num_turns >= TURNS
