"""One sample of an answer under way: its tokens as an engine gave them, and its text."""

from __future__ import annotations

import asyncio
import math
import time

from opentelemetry.trace import Span

from contract.engines import CancelReason
from contract.outputs import FinishReason, FirstToken
from gateway.engines.continuation import ContinuousStream
from gateway.engines.types import EngineOutput
from gateway.pipeline.delta import ChoiceDelta, ChoiceStream, first_computed_s
from gateway.text.delta import ToolCallDelta
from gateway.types.deliberation import TokensOfSample

# Tokens of the chosen answer that are told at once.
_TOGETHER = 16
_COMPLETE = frozenset({FinishReason.STOP, FinishReason.TOOL_CALLS})


class AnswerPart:
    """A part of the work under way. What it gives is kept until one of them is the answer."""

    # Who writes it, where another model than the request's does.
    model: str | None = None
    # What it is to the answer, where parts differ: see `TokensOfSample`.
    part: str | None = None

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_open = True
        # Why it ended; None for one that was ended, or failed.
        self.finish: FinishReason | None = None
        self.num_tokens = 0
        self.vote: str | None = None
        self.score: float | None = None
        self.has_failed = False
        # A step of an answer that goes on has ended.
        self.is_step = False
        # The step that it goes on from, under whose span its own one is.
        self.parent: AnswerPart | None = None
        self.span: Span | None = None
        self.started_s = time.monotonic()
        self.first_output_s = self.ended_s = 0.0
        self.task: asyncio.Task[None] | None = None
        self._said = ChoiceDelta()

    def close(self, finish: FinishReason | None, reason: CancelReason = CancelReason.STOP_STRING) -> None:
        """Nothing more is taken of it; what its engine has not ended, ends there at once."""
        if self.is_open:
            self.is_open, self.finish, self.ended_s = False, finish, time.monotonic()
            self._end(reason)

    def _end(self, reason: CancelReason) -> None:
        raise NotImplementedError

    @property
    def engine(self) -> str:
        """Who computes it."""
        raise NotImplementedError

    def pieces(self) -> list[EngineOutput]:
        """The answer as an attempt reads it, piece by piece. One that was ended is cut."""
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """Whether it ended by itself."""
        return self.finish in _COMPLETE

    @property
    def text(self) -> str:
        """What it says."""
        return self._said.content

    @property
    def calls(self) -> list[ToolCallDelta]:
        """Tools that it calls."""
        return self._said.tool_calls

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; 0 where they are not known."""
        return 0.0

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token as it was generated, after the first; None without another one."""
        raise NotImplementedError

    def told(self, *, is_chosen: bool, score: float | None) -> TokensOfSample:
        """As usage tells it."""
        if is_chosen:
            outcome = "chosen"
        elif self.has_failed:
            outcome = "failed"
        elif self.finish is None and not self.is_step:
            outcome = "stopped"
        else:
            outcome = "complete" if self.is_complete or self.is_step else "cut"
        return TokensOfSample(
            completion_tokens=self.num_tokens,
            outcome=outcome,  # type: ignore[arg-type]
            part=self.part,  # type: ignore[arg-type]
            model=self.model,
            vote=self.vote,
            score=score if score is not None and math.isfinite(score) else None,
        )


class RunningSample(AnswerPart):
    """A sample of the request's own prompt, by its own model."""

    def __init__(
        self,
        index: int,
        stream: ContinuousStream,
        choice: ChoiceStream,
        logprobs: int | None,
        *,
        parent: RunningSample | None = None,
        delimiter: str = "",
    ) -> None:
        """`logprobs` is what the client asked for: alternatives that it is not shown are not kept. It goes on
        from `parent`, and ends with `delimiter`, where there is one, behind a text of its own.
        """
        super().__init__(index)
        self.stream = stream
        self.first_token: FirstToken | None = None
        self._choice = choice
        self._logprobs = logprobs
        self._logprob_sum = 0.0
        self._outputs: list[EngineOutput] = []
        self._delimiter = delimiter
        # Of the steps before it.
        self._num_before = 0
        self._pace_before = (0, 0.0)
        self._last_output_s = 0.0
        self.parent = parent
        if parent is not None:
            self._go_on(parent)
        self._start = len(self.text)

    def _go_on(self, parent: RunningSample) -> None:
        self._logprob_sum, self._num_before = parent._logprob_sum, parent.num_path_tokens
        self._pace_before = parent._pace
        for output in parent._outputs:
            self._outputs.append(output)
            again = EngineOutput(0, list(output.token_ids), logprobs=output.logprobs)
            if (delta := self._choice.feed(again)) is not None:
                self._said.absorb_text(delta)

    @property
    def num_path_tokens(self) -> int:
        """Its tokens and those of the steps before it."""
        return self._num_before + self.num_tokens

    @property
    def path_ids(self) -> tuple[int, ...]:
        """These tokens."""
        return tuple(each for output in self._outputs for each in output.token_ids)

    @property
    def mean_logprob(self) -> float:
        """Of all of them; 0 without any."""
        return self._logprob_sum / self.num_path_tokens if self.num_path_tokens else 0.0

    @property
    def tpot_s(self) -> float | None:
        """See AnswerPart."""
        num_tokens, seconds = self._pace
        return seconds / num_tokens if num_tokens else None

    @property
    def _pace(self) -> tuple[int, float]:
        """Tokens after the first of each step of the path, and the seconds from that one on."""
        num_before, before_s = self._pace_before
        first = self.first_token
        if first is None or self.num_tokens < 2:
            return self._pace_before
        seconds = self._last_output_s - first_computed_s(first, self.started_s, self.first_output_s)
        return num_before + self.num_tokens - 1, before_s + seconds

    @property
    def engine(self) -> str:
        """See AnswerPart."""
        return self.stream.engine

    def _end(self, reason: CancelReason) -> None:
        self.stream.cancel(reason)

    def take(self, output: EngineOutput) -> tuple[float, ...]:
        """Takes in an output; gives the confidences of the tokens that belong to the answer, or their
        log-probabilities where those were not asked for.
        """
        self._last_output_s = time.monotonic()
        self.first_output_s = self.first_output_s or self._last_output_s
        self.first_token = self.first_token or output.first_token
        logprobs = output.logprobs
        kept = EngineOutput(0, [], logprobs=(), prompt_logprobs=output.prompt_logprobs)
        # The text may end before the output's last token, which is then taken out of it.
        delta = self._choice.feed(output)
        logprobs = logprobs[: len(output.token_ids)]
        kept.token_ids = list(output.token_ids)
        if self._logprobs is not None:
            kept.logprobs = logprobs
        self.num_tokens += len(kept.token_ids)
        self._logprob_sum += math.fsum(max(each.logprob, -9999.0) for each in logprobs)
        if delta is not None:
            self._said.absorb_text(delta)
            if delta.finish_reason is not None:
                kept.finish_reason = output.finish_reason or FinishReason.STOP
                self.close(delta.finish_reason)
        self._outputs.append(kept)
        if self.is_open and self._delimiter and self._is_over():
            self.is_step = True
            self.close(None)
        if output.confidences:
            return output.confidences[: len(output.token_ids)]
        return tuple(each.logprob for each in logprobs)

    def _is_over(self) -> bool:
        step = self.text[self._start :].lstrip()
        return self._delimiter in step

    def pieces(self) -> list[EngineOutput]:
        """See AnswerPart: as an engine would give it, in pieces of some tokens."""
        pieces: list[EngineOutput] = []
        for output in self._outputs:
            if not pieces or len(pieces[-1].token_ids) >= _TOGETHER:
                pieces.append(EngineOutput(0, []))
            last = pieces[-1]
            last.token_ids += output.token_ids
            last.logprobs += output.logprobs
            last.prompt_logprobs = last.prompt_logprobs or output.prompt_logprobs
            last.finish_reason = output.finish_reason
        if not pieces:
            pieces.append(EngineOutput(0, []))
        pieces[-1].finish_reason = pieces[-1].finish_reason or FinishReason.LENGTH
        return pieces
