"""Commands of the front to calls of vLLM, its outputs to events: the only state on this side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .calls import CoreCall, calls_of
from .choices import (
    BATCH_FULL,
    CANCELLED,
    DEADLINE,
    GRAMMAR_COMPILE,
    KV_PRESSURE,
    LENGTH,
    STOP,
    CoreChoice,
    CoreRequest,
)
from .meter import CoreMeter
from .order import FairOrder

# The engine core is asked how it is so often, in seconds; its answer is the heartbeat.
_BEAT_S = 1.0
# Clocks that differ by more than this are those of two machines, in seconds.
_SAME_CLOCK_S = 1.0


_NOT_FINITE = {
    "reason": "POISONED_REQUEST",
    "message": "what vLLM made of this text has numbers that are not finite; others are not affected; do not "
    "send it again unchanged",
    "metadata": {"cause": "not_finite"},
}


class EngineDied(Exception):
    """The engine core, or one of its workers, is gone."""


class SubmissionRefused(Exception):
    """vLLM does not take a request; says why."""


class Engine(Protocol):
    """What the bridge asks of vLLM."""

    @property
    def facts(self) -> dict[str, Any]:
        """engine.types.ModelFacts."""
        ...

    @property
    def memory(self) -> dict[str, Any]:
        """engine.types.MemoryPlan."""
        ...

    async def add(self, call: CoreCall) -> None:
        """Begins a choice; raises Refused."""
        ...

    async def abort(self, keys: list[str]) -> None:
        """Ends choices without an output."""
        ...

    async def outputs(self) -> Any:
        """The next step's outputs (vLLM's EngineCoreOutputs); raises EngineDied."""
        ...

    async def books(self) -> dict[str, Any]:
        """The core's own count: `free` and `total` blocks, `keys` of what it holds, and of each data-parallel
        rank its `free` and `total` blocks and how many choices are `running`; raises EngineDied.
        """
        ...

    def kv_events(self) -> list[dict[str, Any]]:
        """Changes of the prefix cache since the last time."""
        ...

    async def add_adapter(self, name: str, folder: str) -> str:
        """Serves an adapter, by its version, from now on; what keeps it from that, or nothing. Raises
        EngineDied.
        """
        ...

    def drop_adapter(self, name: str) -> None:
        """No further request asks for an adapter."""
        ...

    def logprobs(self, output: Any) -> list[list[Any]]:
        """Log-probabilities of an output's new tokens, as contract.outputs.TokenLogprobs."""
        ...

    def prompt_logprobs(self, output: Any, num_prompt: int) -> list[list[Any]]:
        """Log-probabilities of the prompt's tokens after the first, once they are there."""
        ...

    def pooled(self, output: Any, call: CoreCall) -> bytes | None:
        """What a model that pools made of a text; None where it is no answer."""
        ...


class Bridge:
    """Lives on one event loop. `send` passes a report to the front."""

    def __init__(
        self,
        engine: Engine,
        send: Callable[[dict[str, Any]], None],
        *,
        max_num_seqs: int,
        num_ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._send = send
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._requests: dict[int, CoreRequest] = {}
        # Choices by vLLM's key, with the request of each.
        self._choices: dict[str, tuple[CoreRequest, CoreChoice]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._order = FairOrder()
        self._meter = CoreMeter(engine.memory["num_blocks"], num_ranks)
        self._eos = tuple(engine.facts["eos_token_ids"])
        self._step_id = 0

    # --- commands ---

    async def command(self, command: dict[str, Any]) -> None:
        """Does what the front asks; "stop" is the caller's own."""
        match command["type"]:
            case "submit":
                await self._submit(command["request"])
            case "cancel":
                await self._end(command["request_id"], command.get("reason", CANCELLED))
            case "fail":
                await self._fail(command["request_id"], command["failure"])
            case "add_adapter":
                problem = await self._engine.add_adapter(command["name"], command["folder"])
                self._send({"type": "adapter_added", "token": command["token"], "problem": problem})
            case "drop_adapter":
                self._engine.drop_adapter(command["name"])
            case "check":
                await self._check(command["token"])

    async def _submit(self, request: dict[str, Any]) -> None:
        opened = CoreRequest(request, self._order.tag(request))
        self._requests[request["request_id"]] = opened
        calls = calls_of(request, self._engine.memory["max_model_len"], self._eos)
        cause = self._wait_cause() or (GRAMMAR_COMPILE if request["grammar"] is not None else "")
        for call in calls:
            call.start_tag = opened.start_tag
            choice = CoreChoice(call, request["arrival_s"], wait_cause=cause)
            opened.choices[call.key] = choice
            self._choices[call.key] = (opened, choice)
        deadline = request["deadline_s"]
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timers[request["request_id"]] = loop.call_later(
                max(0.0, deadline - self._clock()), self._late, request["request_id"]
            )
        try:
            for call in calls:
                await self._engine.add(call)
        except SubmissionRefused as error:
            problem = {"reason": "INVALID_ARGUMENT", "message": f"vLLM does not take this request: {error}"}
            await self._fail(request["request_id"], problem)

    def _wait_cause(self) -> str:
        if self._meter.num_running >= self._max_num_seqs:
            return BATCH_FULL
        return KV_PRESSURE if self._meter.num_free * 20 < self._meter.num_blocks else ""

    def _late(self, request_id: int) -> None:
        task = asyncio.ensure_future(self._end(request_id, DEADLINE))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _end(self, request_id: int, reason: int) -> None:
        opened = self._requests.get(request_id)
        if opened is None:
            return
        now = self._clock()
        self.publish(
            [
                opened.event(choice, finish_reason=reason, statistics=choice.history(now))
                for choice in opened.choices.values()
            ]
        )
        await self._engine.abort(self._forget(opened))

    async def _fail(self, request_id: int, failure: dict[str, Any]) -> None:
        opened = self._requests.get(request_id)
        if opened is not None:
            self.publish([opened.failed(failure)])
            await self._engine.abort(self._forget(opened))

    async def _check(self, token: int) -> None:
        books = await self._engine.books()
        self._meter.counted(books["ranks"])
        stray = sorted(set(books["keys"]) - set(self._choices))
        self._send(
            {
                "type": "checked",
                "token": token,
                "violation": f"vLLM computes for nobody: {stray}" if stray else "",
                "num_unreferenced_blocks": books["free"],
                "num_total_blocks": books["total"],
                "num_requests": len(self._requests),
                "num_runner_states": len(books["keys"]),
            }
        )

    def _forget(self, opened: CoreRequest) -> list[str]:
        """The keys that vLLM still has of a request which has ended."""
        keys = list(opened.choices)
        for key in keys:
            self._choices.pop(key, None)
        opened.choices.clear()
        self._drop(opened.request["request_id"])
        return keys

    def _drop(self, request_id: int) -> None:
        self._requests.pop(request_id, None)
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        if not self._requests:
            self._order.forget()
            self._meter.idle()

    # --- outputs ---

    async def read_outputs(self) -> None:
        """Passes steps on until the engine dies."""
        while True:
            outputs = await self._engine.outputs()
            strays = self.take(outputs)
            if strays:
                await self._engine.abort(strays)

    def take(self, outputs: Any) -> list[str]:
        """One step's outputs; returns keys that must be taken back because their request has failed."""
        now = self._clock()
        stamp = outputs.timestamp or now
        offset = now - stamp if abs(now - stamp) > _SAME_CLOCK_S else 0.0
        at_s = stamp + offset
        if outputs.scheduler_stats is not None:
            stats = outputs.scheduler_stats
            self._meter.record(outputs.engine_index, stats.num_running_reqs, stats.kv_cache_usage)
        events: list[dict[str, Any]] = []
        strays: list[str] = []
        begins: list[float] = []
        prefill = sampled = 0
        for output in outputs.outputs:
            found = self._choices.get(output.request_id)
            if found is None:
                continue
            opened, choice = found
            prefill += self._note(opened, choice, output, offset)
            sampled += len(output.new_token_ids)
            if choice.first_token_s is None and choice.scheduled_s is not None:
                begins.append(choice.scheduled_s)
            events.append(self._event(opened, choice, output, at_s, strays))
        self._meter.step(at_s, min(begins, default=None), prefill, sampled, len(outputs.outputs))
        if not self._requests:
            self._meter.idle()
        if events or outputs.scheduler_stats is not None:
            self.publish(events)
        return strays

    def _note(self, opened: CoreRequest, choice: CoreChoice, output: Any, offset: float) -> int:
        """Books what came with an output; the number of prompt tokens that were computed for it."""
        for event in output.events or ():
            kind = event.type.name
            choice.happened(kind, event.timestamp + offset)
            if kind == "SCHEDULED":
                self._order.begins(opened.request["priority"], opened.start_tag)
            elif kind == "PREEMPTED":
                self._meter.preempted(KV_PRESSURE)
        stats = output.prefill_stats
        if stats is None or choice.first_token_s is not None:
            return 0
        choice.num_cached = stats.num_cached_tokens
        self._meter.prompt_done(stats.num_prompt_tokens, stats.num_cached_tokens)
        return int(stats.num_computed_tokens)

    def _event(
        self, opened: CoreRequest, choice: CoreChoice, output: Any, at_s: float, strays: list[str]
    ) -> dict[str, Any]:
        reason, stop_token = _finish(output, choice)
        if reason is None and output.finish_reason is not None:
            strays += [key for key in self._forget(opened) if key != output.request_id]
            return opened.failed(_failure(choice, output.finish_reason.name))
        is_pooled = choice.call.pooling is not None
        is_first = choice.first_token_s is None and (is_pooled or bool(output.new_token_ids))
        if is_first or output.new_token_ids:
            choice.sampled(len(output.new_token_ids), at_s)
        news: dict[str, Any] = {"token_ids": list(output.new_token_ids)}
        if is_pooled:
            pooled = self._engine.pooled(output, choice.call)
            if pooled is None:
                self._forget(opened)
                return opened.failed(_NOT_FINITE)
            news["pooled"] = pooled
        if output.new_logprobs is not None:
            news["logprobs"] = self._engine.logprobs(output)
        if choice.call.prompt_logprobs is not None and is_first:
            num_prompt = len(opened.request["prompt_token_ids"])
            news["prompt_logprobs"] = self._engine.prompt_logprobs(output, num_prompt)
        if is_first and not opened.first_token_sent:
            opened.first_token_sent = True
            news["first_token"] = choice.first_token()
        if reason is not None:
            news |= {"finish_reason": reason, "stop_token_id": stop_token, "statistics": choice.history(at_s)}
            opened.choices.pop(output.request_id, None)
            self._choices.pop(output.request_id, None)
            if not opened.choices:
                self._drop(opened.request["request_id"])
        return opened.event(choice, **news)

    # --- reports ---

    async def beat(self) -> None:
        """Reports the load every second, as long as the engine core answers."""
        while True:
            books = await self._engine.books()
            self._meter.counted(books["ranks"])
            self.publish([])
            await asyncio.sleep(_BEAT_S)

    def publish(self, events: Iterable[dict[str, Any]]) -> None:
        """One message with what happened."""
        self._step_id += 1
        now = self._clock()
        unstarted = [each for _, each in self._choices.values() if each.first_token_s is None]
        oldest = min((each.arrival_s for each in unstarted), default=now)
        pending = sum(len(each.call.prompt_token_ids) for each in unstarted)
        self._send(
            {
                "type": "step",
                "step_id": self._step_id,
                "events": list(events),
                "kv_events": self._engine.kv_events(),
                "load": self._meter.load(len(self._choices), pending, max(0.0, now - oldest)),
                "totals": self._meter.drain_totals(),
            }
        )

    def fail_all(self, cause: str) -> None:
        """The engine is gone: every request ends with STEP_FAILED."""
        failure = {
            "reason": "STEP_FAILED",
            "message": f"the engine's step failed ({cause}) and the engine cannot go on; retry: another "
            "engine, or this one after its restart, will take the request",
            "metadata": {"cause": cause},
            "retry_after_s": 5.0,
        }
        events = [each.failed(failure) for each in self._requests.values()]
        for opened in list(self._requests.values()):
            self._forget(opened)
        self.publish(events)


def _finish(output: Any, choice: CoreChoice) -> tuple[int | None, int | None]:
    """The suite's reason of an end, and the stop token; None where there is none, or it is a failure."""
    if output.finish_reason is None:
        return None, None
    if output.finish_reason.name == "STOP":
        stop = output.stop_reason if isinstance(output.stop_reason, int) else None
        last = output.new_token_ids[-1] if output.new_token_ids else None
        if stop is None and last in choice.call.stop_token_ids:
            stop = last
        return STOP, stop
    return (LENGTH, None) if output.finish_reason.name == "LENGTH" else (None, None)


def _failure(choice: CoreChoice, reason: str) -> dict[str, Any]:
    about = "; its grammar may be beyond what vLLM's llguidance takes" if choice.call.grammar else ""
    return {
        "reason": "POISONED_REQUEST",
        "message": f"vLLM ended this request with {reason.lower()}{about}; others are not affected; do not "
        "send it again unchanged",
        "metadata": {"cause": reason.lower()},
    }
