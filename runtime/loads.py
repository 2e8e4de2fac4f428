"""What gateways and the supervisor tell each other about models that are loaded on demand: lines of JSON over
a socket that their user alone can open. Both send all that they know, whenever some of it changes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Longest line.
LINE_BYTES = 1 << 20


class ModelDemand(msgspec.Struct, frozen=True):
    """Requests of one gateway for one model."""

    num_waiting: int = 0
    # With an engine.
    num_open: int = 0


class Demands(msgspec.Struct, frozen=True, kw_only=True):
    """Gateway to supervisor. Models that nobody asks for are left out."""

    # Of the last LoadStates that it has taken in: from then on nothing is sent to what is not loaded there.
    seen: int
    models: dict[str, ModelDemand] = {}


class LoadState(msgspec.Struct, frozen=True, kw_only=True):
    """Where one model stands."""

    state: Literal["unloaded", "loading", "loaded", "unloading"] = "unloaded"
    # Of the load: what is done, how much of that, 0 to 1, and how many seconds may be left of all of it.
    stage: str = ""
    fraction: float = 0.0
    left_s: float = 0.0
    # Loads that failed, and why the last one did.
    num_failures: int = 0
    why: str = ""


class LoadStates(msgspec.Struct, frozen=True, kw_only=True):
    """Supervisor to gateways; models by their versions (`contract.engines.model_key`)."""

    number: int
    models: dict[str, LoadState]


def line(message: Demands | LoadStates) -> bytes:
    """A message as it is sent."""
    return msgspec.json.encode(message) + b"\n"
