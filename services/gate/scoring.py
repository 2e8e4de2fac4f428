"""From a pair of answers to scores in [0, 1] and their difference in [-1, 1]."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jsonschema_rs

from services.gate.cases import Case, Pair, Scored, ServerAnswer
from services.gate.language import language_of

# Nats a token by which perplexities differ before the difference counts in full: bets need bounds, and a
# model that is worse by that is broken.
INTRINSIC_SCALE = 0.1
# By how much a token's log-probability may be off before it counts in full.
_LOGPROB_SCALE = 0.1
# Nats a token of sampled answers, the same.
_SURPRISAL_SCALE = 2.0

_NUMBER = re.compile(r"-?\d+(?:[.,]\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?")
_REFUSES = re.compile(
    r"(?i)\b(?:i(?:'m| am) (?:sorry|not able|unable)|i (?:can(?:no|')?t|will not|won't|must decline)"
    r"|(?:can|could) ?not help|es tut mir leid|ich kann (?:das|ihnen|dir|dabei) nicht"
    r"|je (?:suis désolé|ne peux pas)|lo siento|no puedo)"
)
_FENCED = re.compile(r"```(?:\w+)?\n(.*?)```", re.DOTALL)


class ProgramRunner(Protocol):
    """Runs a program that a model wrote with its test (sandbox.py)."""

    def passes(self, program: str, test: str) -> bool:
        """Whether both end without an error within the limits."""


class Scorer:
    """Scores of all checks. `seeds_hold` says whether the baseline answers equal seeds equally."""

    def __init__(self, *, seeds_hold: bool, programs: ProgramRunner | None = None) -> None:
        self.seeds_hold = seeds_hold
        self._programs = programs

    def score(self, pair: Pair) -> Scored:
        """Both scores. What the candidate refuses to answer scores 0."""
        case = pair.case
        if case.check == "tokens":
            return self._tokens(pair)
        if case.check in ("perplexity", "continued"):
            return _perplexity(pair)
        ours, theirs = self._checked(case, pair.baseline), self._checked(case, pair.candidate)
        return Scored(
            case=case,
            baseline=ours,
            candidate=theirs,
            difference=ours - theirs,
            candidate_text=_shown(pair.candidate),
        )

    def _tokens(self, pair: Pair) -> Scored:
        """How far from the baseline's answer: its own second answer, against the candidate's.

        Where both servers are the same, the second answer and the candidate's are exchangeable, so whatever
        is computed of each has equal distributions: the difference has mean 0 without any assumption about
        how often a server answers one seed in two ways. The idea of comparing under one seed is Token-DiFR's
        (arXiv 2511.20621). Where seeds are not kept, what is compared is how probable the server found what
        it drew, which changes with temperature and model alike.
        """
        assert pair.control is not None
        if self.seeds_hold:
            control, candidate = (_distance(pair.baseline, each) for each in (pair.control, pair.candidate))
            difference = candidate - control
        else:
            control, candidate = map(_surprisal, (pair.control, pair.candidate))
            difference = max(-1.0, min(1.0, candidate - control))
        return Scored(
            case=pair.case,
            baseline=1.0 - control,
            candidate=1.0 - candidate,
            difference=difference,
            candidate_text=_shown(pair.candidate),
        )

    def _checked(self, case: Case, answer: ServerAnswer) -> float:
        if answer.refusal:
            return 0.0
        if case.check == "code":
            assert self._programs is not None
            return float(self._programs.passes(_program(answer.text), case.answer))
        return float(_CHECKS[case.check](case, answer))


def _distance(baseline: ServerAnswer, other: ServerAnswer) -> float:
    """0 where tokens and log-probabilities are equal: half of it is the share of the answer after the first
    token that differs, half how far the log-probabilities before it are apart.
    """
    if other.refusal:
        return 1.0
    length = max(len(baseline.tokens), len(other.tokens))
    same = next(
        (at for at, (a, b) in enumerate(zip(baseline.tokens, other.tokens, strict=False)) if a != b),
        min(len(baseline.tokens), len(other.tokens)),
    )
    gaps = [
        min(abs(a - b) / _LOGPROB_SCALE, 1.0)
        for a, b in zip(baseline.logprobs[:same], other.logprobs[:same], strict=False)
    ]
    apart = 1.0 - same / length if length else 0.0
    # Where even the first token differs, nothing says that probabilities agree.
    return (apart + (math.fsum(gaps) / len(gaps) if gaps else apart)) / 2


def _surprisal(answer: ServerAnswer) -> float:
    """Mean of minus the log-probability of what was drawn, in [0, 1]."""
    if answer.refusal or not answer.logprobs:
        return 1.0
    return min(-math.fsum(answer.logprobs) / len(answer.logprobs) / _SURPRISAL_SCALE, 1.0)


def _perplexity(pair: Pair) -> Scored:
    given = (_as_given(pair.case, each) for each in (pair.baseline, pair.candidate))
    ours, theirs = map(nats_per_token, given)
    difference = max(-1.0, min(1.0, (theirs - ours) / INTRINSIC_SCALE))
    return Scored(case=pair.case, baseline=ours, candidate=theirs, difference=difference)


def _as_given(case: Case, answer: ServerAnswer) -> ServerAnswer:
    """The answer, unless it is not the text that was to be continued with."""
    if case.check != "continued" or answer.refusal or answer.text == case.answer:
        return answer
    return ServerAnswer(refusal="it did not continue with the text that was given")


def nats_per_token(answer: ServerAnswer) -> float:
    """Mean negative log-probability of a text's tokens, but its first."""
    if answer.refusal or not answer.logprobs:
        return 20.0
    return -math.fsum(answer.logprobs) / len(answer.logprobs)


def _shown(answer: ServerAnswer) -> str:
    said = answer.text or " ".join(f"{call.name}({call.arguments})" for call in answer.calls)
    return (f"refused: {answer.refusal}" if answer.refusal else said)[:500]


# --- checks -----------------------------------------------------------------------------------------------


def _program(text: str) -> str:
    found = _FENCED.search(text)
    return found.group(1) if found else text


def _exact(case: Case, answer: ServerAnswer) -> bool:
    return answer.text.strip() == str(case.answer).strip()


def _contains(case: Case, answer: ServerAnswer) -> bool:
    texts: Sequence[str] = case.answer if isinstance(case.answer, list) else [case.answer]
    return all(each in answer.text for each in texts)


def _regex(case: Case, answer: ServerAnswer) -> bool:
    return bool(re.search(case.answer, answer.text))


def _format(case: Case, answer: ServerAnswer) -> bool:
    return re.fullmatch(case.answer, answer.text) is not None


def parsed(text: str) -> Any:
    """The JSON that a text is, a fence around it left out; raises ValueError for any other."""
    found = _FENCED.fullmatch(text.strip())
    return json.loads(found.group(1) if found else text)


def _json(case: Case, answer: ServerAnswer) -> bool:
    try:
        return bool(parsed(answer.text) == case.answer)
    except (ValueError, RecursionError):
        return False


def _numeric(case: Case, answer: ServerAnswer) -> bool:
    """The last number of the answer is the right one."""
    numbers = _NUMBER.findall(answer.text)
    if not numbers:
        return False
    error = abs(float(numbers[-1].replace(",", "")) - case.answer)
    return bool(error <= case.tolerance + 1e-9 * abs(case.answer))


def _schema(case: Case, answer: ServerAnswer) -> bool:
    try:
        return bool(jsonschema_rs.is_valid(case.answer, json.loads(answer.text)))
    except (ValueError, RecursionError):
        return False


def _tool(case: Case, answer: ServerAnswer) -> float:
    """1 for the right call, or rightly none; 1/2 for the right tool with valid arguments of another value."""
    if case.answer is None:
        return float(not answer.calls)
    if len(answer.calls) != 1 or answer.calls[0].name != case.answer["name"]:
        return 0.0
    try:
        arguments = json.loads(answer.calls[0].arguments)
    except (ValueError, RecursionError):
        return 0.0
    functions = [tool["function"] for tool in case.body["tools"]]
    schema = next(each.get("parameters", {}) for each in functions if each["name"] == case.answer["name"])
    if not jsonschema_rs.is_valid(schema, arguments):
        return 0.0
    is_right = "arguments" not in case.answer or arguments == case.answer["arguments"]
    return 1.0 if is_right else 0.5


def _refusal(case: Case, answer: ServerAnswer) -> bool:
    return bool(case.answer) == bool(_REFUSES.search(answer.text))


def _language(case: Case, answer: ServerAnswer) -> bool:
    return bool(language_of(answer.text) == case.answer)


def _needle(case: Case, answer: ServerAnswer) -> float:
    """The share of what was hidden that the answer has."""
    numbers = set(re.findall(r"\d+", answer.text))
    return sum(each in numbers for each in case.answer) / len(case.answer)


_CHECKS: Mapping[str, Callable[[Case, ServerAnswer], float]] = {
    "exact": _exact,
    "contains": _contains,
    "regex": _regex,
    "format": _format,
    "json": _json,
    "numeric": _numeric,
    "judge": lambda _, answer: bool(answer.judged),
    "schema": _schema,
    "tool": _tool,
    "refusal": _refusal,
    "language": _language,
    "needle": _needle,
}
