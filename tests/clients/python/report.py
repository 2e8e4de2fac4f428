"""What a client's program tells the matrix, and where it finds the stack. Every environment has this file."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BASE_URL = os.environ["CLIENTS_BASE_URL"]
API_KEY = os.environ["CLIENTS_API_KEY"]
# A key that may ask once a minute.
LIMITED_KEY = os.environ["CLIENTS_LIMITED_KEY"]
MODEL = os.environ["CLIENTS_MODEL"]
# host:port of the edge.
ADDRESS = os.environ["CLIENTS_ADDRESS"]
ROOT = Path(os.environ["CLIENTS_ROOT"])
# The client's own environment, and a folder for what it writes.
ENVIRONMENT = Path(os.environ["CLIENTS_ENVIRONMENT"])
OUT = Path(os.environ["CLIENTS_OUT"])

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
RESULT = {"weather": "sunny", "temperature": 21}
CITIES = ("Paris", "Oslo", "Rome", "Cairo", "Lima")
PERSON = "Extract: Anna, 34, lives in Oslo."
QUESTION = "What is the capital of Japan?"
ANSWER = "Tokyo"
# More tokens than any context here has room for.
TOO_LONG = "word " * 6000


def question_of(city: str) -> str:
    """Which the bundled model answers by a call."""
    return f"What is the weather in {city}?"


@contextmanager
def works(feature: str) -> Iterator[None]:
    """The block must end without an exception."""
    try:
        yield
    except Exception:
        _tell(feature, "failed", traceback.format_exc())
    else:
        _tell(feature, "works")


@contextmanager
def refused(feature: str, kind: type[BaseException], name: str) -> Iterator[None]:
    """The block must end with the client's own exception of this kind, whose text has the name."""
    try:
        yield
    except Exception as error:
        is_named = isinstance(error, kind) and name in f"{error} {getattr(error, 'body', '')}"
        if is_named:
            _tell(feature, "refused", type(error).__name__)
        else:
            _tell(feature, "failed", f"expected {kind.__name__} with {name!r}\n{traceback.format_exc()}")
    else:
        _tell(feature, "failed", "it was not refused")


def _tell(feature: str, outcome: str, detail: str = "") -> None:
    with (OUT / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"feature": feature, "outcome": outcome, "detail": detail}) + "\n")
