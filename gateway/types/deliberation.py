"""What a request asks for by `test_time`, and what is told of it in usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

# By what `best_of` chooses, and what voters have voted for.
RANKINGS = ("likelihood", "number", "regex", "schema", "model", "verifier")
BALLOTS = ("auto", "boxed", "number", "json", "regex")
SCORERS = tuple(dict.fromkeys((*RANKINGS, *BALLOTS)))
# Strategies whose parts follow each other, each a question that depends on the one before.
CHAINS = ("escalate", "critique_revise")
ON_FAILURE = ("refuse", "answer")
MAX_PATTERN = 256
MAX_DELIMITER = 16


class ScorerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """By what samples are told apart."""

    type: str
    # Of type regex: what an answer has; a vote is its first group, or all of it.
    pattern: str = ""
    # Of type schema: JSON Schema that an answer keeps.
    schema_json: str = ""
    # Of type number, where it ranks: bounds of the answer's last number. Of type verifier: of its grades.
    minimum: float | None = None
    maximum: float | None = None
    # Of type model: who scores pairs of question and answer. Of type verifier: who is asked. Of the votes of
    # self_consistency: who scores what they weigh.
    model: str = ""


class Deliberation(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of one answer, and how one of them is chosen. None: the client did not say."""

    strategy: str
    samples: int | None = None
    # Generated tokens of all samples together.
    budget_tokens: int | None = None
    # Of votes: how sure it must be that all samples would have said the same. Of `escalate`: the score, or
    # the probability of tokens, from which on the first model is believed.
    confidence: float | None = None
    scorer: ScorerSpec | None = None
    # Of `escalate`: who answers where the first model is doubted.
    model: str = ""
    # Of `search`: what a step ends with.
    delimiter: str = ""
    # Where it cannot be done: "refuse", or the plain "answer" with the reason in usage.
    on_failure: str = "refuse"
    # Why the plain answer is given instead; "" while it is not.
    failure: str = ""

    @property
    def num_samples(self) -> int:
        """Sequences that may be under way at a time."""
        return 1 if self.failure or self.is_chain else self.samples or 1

    @property
    def is_chain(self) -> bool:
        """Whether its parts follow each other."""
        return self.strategy in CHAINS

    @property
    def num_parts(self) -> int:
        """Answers that are generated for it at most; between two drafts there is a critique."""
        if self.failure:
            return 1
        return 2 * (self.samples or 1) - 1 if self.strategy == "critique_revise" else self.samples or 1


class TokensOfSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: what it took, and what became of it."""

    completion_tokens: int
    # "chosen", "complete", "cut" by a limit, "stopped" before its end, or "failed".
    outcome: Literal["chosen", "complete", "cut", "stopped", "failed"]
    # What it voted for, where it did; then what it scored, or its mean log-probability.
    vote: str | None = None
    score: float | None = None
    # What it was to the answer, where they differ; and who wrote it, where that was another model.
    part: Literal["draft", "critique", "revision", "answer", "step"] | None = None
    model: str | None = None


class TokensOfModel(msgspec.Struct, frozen=True, kw_only=True):
    """What was spent on one model, all samples and prompts together."""

    model: str
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    # Of those of the completion.
    reasoning_tokens: int = 0

    def __add__(self, other: TokensOfModel) -> TokensOfModel:
        return TokensOfModel(
            model=self.model,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens + other.cached_prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


class Deliberated(msgspec.Struct, frozen=True, kw_only=True):
    """What became of `test_time`: what was spent on what, and why it ended. `failure` says why the plain
    answer was given instead, or without what should have judged.
    """

    strategy: str
    # "decided", "all_samples", "budget", "deadline" or "failure".
    ended_by: str
    # Samples that were asked for; those that were begun are listed.
    max_samples: int
    samples: list[TokensOfSample]
    # Generated tokens of all samples, which `usage` counts too.
    completion_tokens: int
    # Samples that were ended before their end, or never begun.
    stopped_early: int = 0
    not_begun: int = 0
    votes: Mapping[str, float] = {}
    # Tokens that a model which scores has read; they are a row of their own in the ledger.
    scorer_tokens: int = 0
    failure: str = ""
    # Of `escalate` and `critique_revise`: what was spent on which model, which `usage` is the sum of.
    models: list[TokensOfModel] = []
