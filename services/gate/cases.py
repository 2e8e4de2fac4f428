"""What is asked and what came back: plain data that every part of the gate shares."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any, Literal, get_args

import msgspec

LayerName = Literal["tokens", "intrinsic", "task", "structure", "long_context", "behaviour"]
LAYERS: tuple[LayerName, ...] = get_args(LayerName)
# Window of a server that tells none, in tokens, and the text of a token in characters.
USUAL_WINDOW, USUAL_CHARS_PER_TOKEN = 4096, 4.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class GateVerdict(StrEnum):
    """Of a layer, or of all."""

    WORSE = "worse"
    NOT_WORSE = "not worse"
    NOT_ENOUGH = "not enough cases yet"


EXIT_STATUS = {GateVerdict.NOT_WORSE: 0, GateVerdict.WORSE: 1, GateVerdict.NOT_ENOUGH: 3}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One request with what its answer is held against."""

    id: str
    layer: LayerName
    # Cases of one question are no independent evidence: their differences are averaged.
    question: str
    path: str
    # Without the model, which each server names itself.
    body: dict[str, Any]
    check: str
    answer: Any = None
    # Numeric answers may be off by so much.
    tolerance: float = 0.0
    # Of long contexts: length in tokens, and where the needle is, from 0 (beginning) to 1.
    length: int = 0
    depth: float = 0.0

    def key(self, repetition: int = 0) -> str:
        """Names the request, whatever case it belongs to."""
        asked = msgspec.json.encode((self.path, self.body, repetition), order="deterministic")
        return hashlib.sha256(asked).hexdigest()[:32]


class ToolInvocation(msgspec.Struct, frozen=True, array_like=True):
    """One tool call; arguments as the model wrote them."""

    name: str
    arguments: str


class ServerAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server said. Log-probabilities are natural ones, one for each of `tokens`."""

    text: str = ""
    calls: tuple[ToolInvocation, ...] = ()
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    # Why there is none: the server's refusal.
    refusal: str = ""
    # What the judge said of it, where one was asked.
    judged: bool | None = None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A case as both servers answered it; `control` is the baseline's second answer, where there is one."""

    case: Case
    baseline: ServerAnswer
    candidate: ServerAnswer
    control: ServerAnswer | None = None


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """Both scores of a case in [0, 1], where 1 is best, and by how much the baseline's is higher."""

    case: Case
    baseline: float
    candidate: float
    difference: float
    candidate_text: str = ""
