"""How templates are told whether the model thinks before it answers."""

from __future__ import annotations

from typing import Any


def thinking_options(thinks: bool, effort: str = "") -> dict[str, Any]:
    """Variables of a template: it knows the switch under one of these names. Without an `effort` the
    template has its own.
    """
    switch = {"enable_thinking": thinks, "thinking": thinks}
    return {**switch, "reasoning_effort": effort} if effort else switch
