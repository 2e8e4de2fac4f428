"""First steps of an engine, before it takes requests.

What is made when it is first needed (programs for the kernels, tables of a draw, memory that is touched) is
made here and not under somebody's request; and how fast prompts and answers are is known by measurement,
which the forecasts of waits start from. Nothing of it stays: the requests are this module's own, and so is
the scheduler that they were in.
"""

from __future__ import annotations

import logging
import random

import msgspec

from engine.config import EngineConfig
from engine.core import messages
from engine.core.loop import EngineLoop
from engine.runner.base import Runner
from engine.scheduler import Scheduler
from engine.types import (
    NOT_MEASURED,
    MeasuredSpeed,
    MemoryPlan,
    ModelFacts,
    Request,
    RequestFailure,
    SamplingParams,
)

_log = logging.getLogger(__name__)

# Streams that are measured together, and tokens of each answer.
TOGETHER = 8
_ANSWER_TOKENS = 8
# Prompts: a short one, and one that is long enough to measure if it takes no longer than the limit.
_FIRST_TOKENS = 32
_PROMPT_TOKENS = 512
_PROMPT_LIMIT_S = 1.0
# The largest step has as many tokens as take no longer than this at the measured rate, and no more sequences
# than tokens: it is smaller on a slow machine. The steps of the answers after it have fewer tokens.
_LARGEST_LIMIT_S = 0.5
# From the third token on, a step follows one of the same sequences, as most do.
_LARGEST_ANSWER_TOKENS = 4
# Options as most requests have them, and log-probabilities, so that reports are compiled as well.
_DRAWN = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, logprobs=1, ignore_eos=True)
# A model that pools draws nothing, and its requests end with their prompts.
_POOLED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_SEED = 0


class OwnRequests:
    """The mailbox of a loop that serves requests of its owner alone, whose prompts are random tokens."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._random = random.Random(_SEED)
        self._commands: list[messages.Command] = []
        self._num_requests = 0
        self.totals: list[messages.StepTotals] = []
        self.num_open = 0
        self.failure: RequestFailure | None = None

    def ask(self, num_tokens: int, sampling: SamplingParams) -> None:
        """One more request, with a prompt of so many tokens."""
        self._num_requests += 1
        self.num_open += 1
        request = Request(
            request_id=self._num_requests,
            external_id=self._name,
            prompt_token_ids=tuple(self._random.randrange(self._vocab_size) for _ in range(num_tokens)),
            sampling=sampling,
        )
        self._commands.append(messages.Submit(request))

    def receive(self, timeout_s: float) -> list[messages.Command]:
        """See CommandMailbox."""
        commands, self._commands = self._commands, []
        return commands

    def send(self, message: messages.Report) -> None:
        """See CommandMailbox."""
        if isinstance(message, messages.StepDone):
            self.totals += message.totals
            for event in message.events:
                self.num_open -= event.finish_reason is not None
                self.failure = self.failure or event.failure


class WarmUp:
    """Runs requests on `runner` under `scheduler`, which is of no use afterwards."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        config: EngineConfig,
        memory: MemoryPlan,
        facts: ModelFacts,
        *,
        overlap: bool,
    ) -> None:
        self._scheduler = scheduler
        self._config = config
        self._pools = bool(facts.tasks)
        self._num_tokens = min(facts.max_model_len, memory.capacity_tokens)
        self._capacity_tokens = memory.capacity_tokens
        self._mailbox = OwnRequests("warm-up", facts.vocab_size)
        self._loop = EngineLoop(scheduler, runner, self._mailbox, overlap=overlap)

    @property
    def broken(self) -> bool:
        """The runner is lost."""
        return self._loop.broken

    def run(self) -> MeasuredSpeed:
        """How fast the engine is; 0 for what a small context or batch has no room for."""
        capacity = self._num_tokens - _ANSWER_TOKENS
        if capacity < 1:
            return NOT_MEASURED
        # The first one waits for whatever is made for it.
        self._prompt_rate(min(_FIRST_TOKENS, capacity))
        num_tokens = num_short = min(_FIRST_TOKENS, capacity)
        rate = short_rate = self._prompt_rate(num_short)
        longer = min(_PROMPT_TOKENS, capacity, int(rate * _PROMPT_LIMIT_S))
        if longer > num_short:
            num_tokens, rate = longer, self._prompt_rate(longer)
        self._largest_step(rate)
        together = min(TOGETHER, self._config.scheduler.max_num_seqs)
        each = min(_FIRST_TOKENS, self._num_tokens // together - _ANSWER_TOKENS)
        return MeasuredSpeed(
            prompt_tokens_per_s=rate,
            prompt_tokens=num_tokens,
            short_prompt_tokens_per_s=short_rate,
            short_prompt_tokens=num_short,
            tokens_per_s_alone=self._answer_rate(1, min(_FIRST_TOKENS, capacity)),
            tokens_per_s_together=self._answer_rate(together, each) if each > 0 else 0.0,
            num_together=together,
        )

    def _prompt_rate(self, num_tokens: int) -> float:
        steps = self._serve(1, num_tokens, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        return sum(step.num_tokens for step in steps) / max(sum(step.seconds for step in steps), 1e-9)

    def _largest_step(self, rate: float) -> None:
        """As many sequences and tokens in one step as there may be, and answers to all of them: memory for so
        many is touched, and what grows with their number has grown.
        """
        limits = self._config.scheduler
        num_tokens = min(limits.max_num_batched_tokens, int(rate * _LARGEST_LIMIT_S))
        num_requests = min(limits.max_num_seqs, max(TOGETHER, num_tokens))
        num_requests = min(num_requests, self._capacity_tokens // (1 + _LARGEST_ANSWER_TOKENS))
        if num_requests < 1:
            return
        capacity = min(self._num_tokens, self._capacity_tokens // num_requests) - _LARGEST_ANSWER_TOKENS
        each = max(1, min(num_tokens // num_requests, capacity))
        self._serve(num_requests, each, msgspec.structs.replace(_DRAWN, max_tokens=_LARGEST_ANSWER_TOKENS))

    def _answer_rate(self, num_requests: int, num_tokens: int) -> float:
        sampling = msgspec.structs.replace(_DRAWN, max_tokens=_ANSWER_TOKENS)
        steps = self._serve(num_requests, num_tokens, sampling)
        rates = [
            step.num_tokens / step.seconds
            for step in steps
            if step.kind == "decode" and step.num_sequences == num_requests and step.seconds > 0
        ]
        # Other programs may take a processor for a while, when a whole stack starts more than ever.
        return max(rates, default=0.0)

    def _serve(
        self, num_requests: int, num_tokens: int, sampling: SamplingParams
    ) -> list[messages.StepTotals]:
        """The steps that so many requests with prompts of so many tokens took."""
        if self._pools:
            sampling = _POOLED
        mailbox = self._mailbox
        mailbox.totals = []
        for _ in range(num_requests):
            mailbox.ask(num_tokens, sampling)
        # To the plan after the last, with which the runner forgets them.
        while (mailbox.num_open or self._scheduler.has_work) and not self._loop.stopped:
            self._loop.step()
        if mailbox.failure is not None:
            _log.error("the engine's first steps failed: %s", mailbox.failure.message)
        return mailbox.totals
