"""The `x-ratelimit-*` headers of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.limits.store import WINDOW_MS


class WindowView(msgspec.Struct, frozen=True):
    """A window as last seen."""

    limit: int
    used: int
    # Seconds since the Unix epoch.
    seen_s: float

    @property
    def remaining(self) -> int:
        """What could still be charged."""
        return max(0, self.limit - self.used)


def window_headers(what: str, views: Sequence[WindowView], now_s: float) -> dict[str, str]:
    """Headers about "requests" or "tokens" per minute; the tightest of `views` counts."""
    if not views:
        return {}
    tightest = min(views, key=lambda view: view.remaining)
    # A window is empty again one window after its last charge.
    reset_s = max(0.0, WINDOW_MS / 1000 - (now_s - tightest.seen_s)) if tightest.used else 0.0
    return {
        f"x-ratelimit-limit-{what}": str(tightest.limit),
        f"x-ratelimit-remaining-{what}": str(tightest.remaining),
        f"x-ratelimit-reset-{what}": duration(reset_s),
    }


def duration(seconds: float) -> str:
    """OpenAI's form of a duration: "350ms", "1.5s", "1m0s"."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    text = f"{milliseconds / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text
