"""Who is accepted at a vLLM engine, decided in the front before its core hears of a request.

The policy is that of our own engine; what is coarser is what it knows. It is sent requests and tokens
from outside: what waits is what has no first token yet, and slots come free at the measured rate at which
answers end. vLLM takes no slot that is held, and blocks are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.errors import RequestFailure
from engine.config import SchedulerConfig
from engine.core.messages import StepDone
from engine.policy.door import Door, refuse_impossible
from engine.policy.forecast import Batch
from engine.policy.line import Line, Waiter, account_of, slots_of
from engine.policy.rates import StepRate, Traffic
from engine.policy.shares import Account, Shares
from engine.types import MemoryPlan, Request, TokenEvent
from engine.vllm_core.options import refuse


@dataclass(slots=True)
class _Inside:
    """A request that the core has, and each of its choices that runs. See engine.policy.forecast.Running."""

    request: Request
    num_open: int
    has_begun: bool = False
    num_output_tokens: int = 0
    boosted: bool = True
    remaining_prefill: int = 0
    num_held_blocks: int = 0
    num_held_window_blocks: int = 0

    @property
    def account(self) -> Account:
        return account_of(self.request)

    @property
    def max_output_tokens(self) -> int:
        return self.request.sampling.max_tokens


class FrontDoor:
    """Knows every request inside by the events that pass. Lives in the front."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._memory: MemoryPlan | None = None
        self._inside: dict[int, _Inside] = {}
        shares = Shares(config.output_token_cost, config.fairness_band_tokens)
        self._line, self._rate, self._traffic = Line(config, shares), StepRate(), Traffic()
        self._door = Door(config, self._line, shares, self._rate, self._traffic)

    def opens(self, memory: MemoryPlan) -> None:
        """The core is ready."""
        self._memory = memory

    def refusal(self, request: Request, now: float) -> RequestFailure | None:
        """Why a request is not accepted; None when it is, and then it is inside."""
        lacks = refuse(request)
        if lacks is not None:
            return RequestFailure.of(lacks)
        num_tokens, num_slots = len(request.prompt_token_ids), slots_of(request)
        if self._memory is not None:
            begun = [each for each in self._inside.values() if each.has_begun]
            running = [each for each in begun for _ in range(each.num_open)]
            batch = Batch(self._config.max_num_seqs, running, self._memory.block_size)
            failure = refuse_impossible(request, self._memory, self._config.max_num_seqs)
            failure = failure or self._door.refusal(request, num_tokens, batch, now)
            if failure is not None:
                return failure
        self._inside[request.request_id] = _Inside(request, request.sampling.n)
        self._traffic.arrived(account_of(request), num_slots, now)
        self._traffic.freed.run(now, running=True)
        order, prompt_s = (request.request_id, 0), self._rate.seconds_for(num_tokens)
        self._line.push(Waiter(request.request_id, request, order, num_slots, num_tokens, prompt_s))
        return None

    def passes(self, step: StepDone, now: float) -> None:
        """Records what the core reports."""
        self._rate.full_prefill_tokens_per_s = step.load.prefill_tokens_per_s
        for event in step.events:
            self._note(event, now)
        if not self._inside:
            self._traffic.freed.run(now, running=False)

    def _note(self, event: TokenEvent, now: float) -> None:
        inside = self._inside.get(event.request_id)
        if inside is None:
            return
        if not inside.has_begun:
            inside.has_begun = True
            self._line.remove(event.request_id)
        inside.num_output_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            inside.num_open -= 1
            self._traffic.freed.count(now)
        if event.failure is not None or inside.num_open == 0:
            del self._inside[event.request_id]
            self._rate.ended(inside.num_output_tokens // slots_of(inside.request))
