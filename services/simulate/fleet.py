"""A fleet in virtual time: gateways with the shipped routing and continuation, engines with the shipped
scheduler.

One thread, one clock, which jumps from one event to the next. What is modelled are the length of a step and
the time to start an engine; messages take no time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from contract.engines import CancelReason, EngineInfo, EngineLoad, KvEvent
from contract.errors import MillraceError, Reason
from contract.sampling import SamplingParams
from engine.types import Request, SchedulerLoad, TokenEvent
from gateway.config import GatewayConfig
from gateway.engines.attachment import Attachment, EngineReady, Leg, Lost
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet
from gateway.engines.types import EngineOutput, Submission
from gateway.tiers import Tier, Tiers
from services.simulate.arrivals import ArrivingRequest, PromptMaker
from services.simulate.engine import TOKEN, Reports, VirtualEngine
from services.simulate.step_model import EngineSetup

_MODEL = "model"


class Clock:
    """Virtual time, and what is to be done at which moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_at(self, at_s: float, call: Callable[[], None], order: int = 0) -> None:
        """Has `call` made then; of one moment, the lower order goes first."""
        heapq.heappush(self._queue, (at_s, order, next(self._numbers), call))

    def run(self, until_s: float = math.inf) -> None:
        """Until nothing is left to do, or until that moment."""
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now, _, _, call = heapq.heappop(queue)
            call()


class Promise(msgspec.Struct, frozen=True):
    """What the signed context of a request says."""

    tier: Tier
    tenant: str
    weight: float
    arrival_s: float


class ServedRequest:
    """What became of one request, as its client saw it. Times are moments, in seconds."""

    __slots__ = (
        "arrival",
        "end_s",
        "failure",
        "first_s",
        "gap_s",
        "last_s",
        "num_losses",
        "num_tokens",
        "tier",
    )

    def __init__(self, arrival: ArrivingRequest, tier: Tier) -> None:
        self.arrival = arrival
        self.tier = tier
        self.num_tokens = 0
        self.first_s = self.last_s = self.end_s = math.nan
        # Longest time between two tokens.
        self.gap_s = 0.0
        # Reason of its refusal or failure.
        self.failure = ""
        self.num_losses = 0

    def take(self, ends_s: Sequence[float]) -> None:
        """One token at each of these moments."""
        if not self.num_tokens:
            self.first_s = self.last_s = ends_s[0]
        last_s = self.last_s
        for end_s in ends_s:
            self.gap_s = max(self.gap_s, end_s - last_s)
            last_s = end_s
        self.last_s = last_s
        self.num_tokens += len(ends_s)

    @property
    def ttft_s(self) -> float:
        """Time to the first token; nan without one."""
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time for a token after the first; nan for fewer than two."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else math.nan


class _Inbox:
    """In place of a stream's mailbox: whatever comes is taken at once."""

    __slots__ = ("_take", "served")

    def __init__(self, take: Callable[[Any], None], served: ServedRequest) -> None:
        self._take = take
        self.served = served

    def put(self, item: Any) -> None:
        """An output."""
        self._take(item)

    put_last = put

    def close(self) -> None:
        """Nobody reads any more."""
        self._take = _ignored


def _ignored(item: Any) -> None:
    """What comes too late."""


class VirtualStream(ContinuousStream):
    """The shipped continuation, without a loop: it is called for everything that comes."""

    def __init__(self, gateway: VirtualGateway, submission: Submission, served: ServedRequest) -> None:
        promise: Promise = submission.context
        accepted = msgspec.structs.replace(promise, tier=promise.tier.accepted)
        super().__init__(gateway.fleet, submission, renew=lambda: accepted)
        self.served = served
        self._gateway = gateway
        self._inbox = _Inbox(self._receive, served)  # type: ignore[assignment]
        self.is_waiting = False

    def begin(self) -> None:
        """Submits."""
        try:
            self.start()
        except MillraceError as error:
            self._fail(error)

    def _receive(self, item: Any) -> None:
        try:
            if isinstance(item, EngineOutput):
                self._note(item)
                if item.finish_reason is not None:
                    self._end("")
            elif isinstance(item, Lost):
                self._note_loss(item)
            elif isinstance(item, EngineReady):
                self.is_waiting = False
            else:
                raise item
            self._go_on()
        except MillraceError as error:
            self._fail(error)

    def _await_engine(self) -> None:
        if not self.is_waiting:
            self.is_waiting = True
            self._gateway.wait_for_engine(self)

    def give_up(self) -> None:
        """No engine came in time."""
        if self.is_waiting:
            limit_s = self._config.continuation_wait_s
            self._receive(self._lost(f"no other engine was attached within {limit_s:g} s"))

    def ready(self) -> None:
        """An engine takes requests again."""
        self._receive(EngineReady())

    def _fail(self, error: MillraceError) -> None:
        self.cancel(CancelReason.CLIENT)
        self._end(error.reason.value)

    def _end(self, failure: str) -> None:
        self.is_waiting = False
        self.served.failure = failure
        self.served.end_s = self._gateway.clock.now
        self.served.num_losses = self.num_losses
        self._gateway.ended(self)


class VirtualAttachment(Attachment):
    """An attachment without a connection. It is the engine's listener in its gateway."""

    # Set as soon as there is an engine behind it.
    node: EngineNode | None = None

    def start(self) -> None:
        """Nothing to connect to."""

    def connect(self, node: EngineNode) -> None:
        """The engine is there."""
        self.node = node
        self._welcome(node.info)

    def disconnect(self) -> None:
        """The engine is gone."""
        self.node = None
        self._detach()

    def report(self, load: EngineLoad, events: list[KvEvent]) -> None:
        """What an engine tells with a step."""
        self._set_load(load)
        if events and self._on_kv_events is not None:
            self._on_kv_events(self, events)

    def output(self, leg: Leg, output: EngineOutput) -> None:
        """A request's part of a step; nothing for one that was taken back."""
        if leg.handle in self._legs:
            self._take_output(leg, output)

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """Nobody cancels in a simulation: streams end with their engines' last words."""

    def _pass_on(self, leg: Leg, submission: Submission) -> None:
        assert self.node is not None, "only engines that are ready are submitted to"
        self.node.submit(leg, submission)


class VirtualGateway:
    """One gateway: the shipped fleet over some of the engines, and the streams that wait for one."""

    def __init__(
        self, name: str, clock: Clock, config: GatewayConfig, ended: Callable[[ServedRequest], None]
    ) -> None:
        self.clock = clock
        self.fleet = Fleet(
            gateway=name,
            routing=config.routing,
            attachment=VirtualAttachment,
            autoscaling=config.autoscaling,
            clock=lambda: clock.now,
        )
        self._told_ended = ended
        self._waiting: list[VirtualStream] = []

    def set_engines(self, targets: Sequence[str]) -> None:
        """Who of all engines this gateway is attached to."""
        drive(self.fleet.set_targets(targets))

    def attachment(self, target: str) -> VirtualAttachment | None:
        """The one to an engine, if there is one."""
        found = next((each for each in self.fleet.attachments if each.target == target), None)
        assert found is None or isinstance(found, VirtualAttachment)
        return found

    def submit(self, submission: Submission, served: ServedRequest) -> None:
        """A request of a client, noted as `Attempts` notes it."""
        target_ms = served.tier.config.tpot_target_ms
        target_s = None if target_ms is None else target_ms / 1000
        num_tokens = len(submission.prompt_token_ids)
        self.fleet.note_asked(submission.model, submission.pool, num_tokens, target_s)
        VirtualStream(self, submission, served).begin()

    def wait_for_engine(self, stream: VirtualStream) -> None:
        """A stream has lost its engine, and there is no other."""
        self._waiting.append(stream)
        self.clock.call_at(self.clock.now + self.fleet.routing.continuation_wait_s, stream.give_up)

    def engine_ready(self) -> None:
        """Streams that wait go on."""
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            if stream.is_waiting:
                stream.ready()

    def ended(self, stream: VirtualStream) -> None:
        """A stream has had its last word."""
        self._told_ended(stream.served)


class EngineNode(Reports):
    """One engine of the fleet with everybody who is attached to it; it can die, start again, and drain."""

    def __init__(
        self, index: int, zone: int, setup: EngineSetup, clock: Clock, seed: int, *, skips: bool
    ) -> None:
        self.index = index
        self.zone = zone
        self.target = f"engine-{index}:50071"
        self.attachments: list[VirtualAttachment] = []
        self._setup, self._clock, self._skips = setup, clock, skips
        self._seed = seed * 1_000_003 + index
        self._open: dict[int, tuple[VirtualAttachment, Leg, ServedRequest]] = {}
        self._ids = itertools.count(1)
        self._engine: VirtualEngine | None = None
        self.draining = False
        self.busy_s = 0.0
        # Seconds that it was there, loading included; since when it is.
        self.held_s = 0.0
        self.since_s: float | None = None
        self.num_starts = 0
        memory, limits = setup.memory, setup.scheduler
        self.info = EngineInfo(
            engine_id=self.target,
            model=_MODEL,
            vocabulary_fingerprint="",
            max_model_len=memory.max_model_len,
            block_size=memory.block_size,
            num_blocks=memory.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )

    @property
    def is_up(self) -> bool:
        """Whether it is ready."""
        return self._engine is not None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def hold(self) -> None:
        """It is started: from now on it costs."""
        if self.since_s is None:
            self.since_s = self._clock.now
            self.num_starts += 1

    def release(self) -> None:
        """It is not there any more."""
        if self.since_s is not None:
            self.held_s += self._clock.now - self.since_s
            self.since_s = None

    def begin(self) -> None:
        """It is ready."""
        self.hold()
        self.draining = False
        self._engine = VirtualEngine(self._setup, self._seed, self, self._call_at, skips=self._skips)
        for attachment in self.attachments:
            attachment.connect(self)

    def end(self) -> None:
        """It dies, and what it had in memory with it."""
        if self._engine is not None:
            self._engine.stop(self._clock.now)
        self.account()
        if self._engine is None:
            return
        self._engine = None
        self._open.clear()
        for attachment in self.attachments:
            attachment.disconnect()

    def account(self) -> None:
        """Books what it has cost and computed, at its end or the simulation's."""
        self.release()
        if self._engine is not None:
            self.busy_s += self._engine.busy_s
            self._engine.busy_s = 0.0

    def drain(self) -> None:
        """It finishes what it has, takes nothing new, and ends then."""
        self.draining = True
        for attachment in self.attachments:
            attachment.report(msgspec.structs.replace(attachment.load, draining=True), [])
        if not self._open:
            self.end()

    def _call_at(self, at_s: float) -> None:
        engine = self._engine

        def wake() -> None:
            if engine is not None and engine is self._engine and engine.next_s == at_s:
                engine.wake(at_s)

        # Engines of one moment wake in the order of their numbers, after whoever comes in it.
        self._clock.call_at(at_s, wake, 1 + self.index)

    def submit(self, leg: Leg, submission: Submission) -> None:
        """From a gateway."""
        assert self._engine is not None, "it is attached"
        number = next(self._ids)
        attachment, inbox = leg.attachment, leg.inbox
        assert isinstance(attachment, VirtualAttachment), "gateways here have no others"
        assert isinstance(inbox, _Inbox), "streams here have no others"
        self._open[number] = attachment, leg, inbox.served
        self._engine.submit(request_of(number, submission, self._clock.now), self._clock.now)

    def tokens(self, request_id: int, ends_s: Sequence[float]) -> None:
        """See Reports."""
        attachment, leg, served = self._open[request_id]
        served.take(ends_s)
        attachment.output(leg, EngineOutput(0, [TOKEN] * len(ends_s)))

    def event(self, event: TokenEvent, now: float) -> None:
        """See Reports."""
        attachment, leg, served = self._open[event.request_id]
        if event.token_ids:
            served.take((now,) * len(event.token_ids))
        output = EngineOutput(0, list(event.token_ids), event.finish_reason)
        if event.failure is not None:
            failure = event.failure
            output.error = MillraceError(
                Reason[failure.reason], failure.message, retry_after_s=failure.retry_after_s
            )
        if event.finish_reason is not None or event.failure is not None:
            del self._open[event.request_id]
        attachment.output(leg, output)

    def state(self, load: SchedulerLoad, kv_events: tuple[KvEvent, ...]) -> None:
        """See Reports."""
        if self.draining:
            load = msgspec.structs.replace(load, draining=True)
            if not self._open:
                self._clock.call_at(self._clock.now, self.end)
        events = list(kv_events)
        for attachment in self.attachments:
            attachment.report(load, events)


def request_of(number: int, submission: Submission, now: float) -> Request:
    """What an engine's front makes of a submission, whose context is a Promise here."""
    promise: Promise = submission.context
    tier = promise.tier.config

    def after(limit_ms: int | None) -> float | None:
        return None if limit_ms is None else now + limit_ms / 1000

    return Request(
        request_id=number,
        external_id=submission.request_id,
        prompt_token_ids=submission.prompt_token_ids,
        output_token_ids=submission.output_token_ids,
        sampling=submission.sampling,
        choice_index=submission.choice_index,
        tenant=promise.tenant,
        tier=promise.tier.name,
        priority=tier.priority,
        weight=promise.weight,
        cache_salt=submission.cache_salt,
        arrival_s=now,
        ttft_deadline_s=after(tier.ttft_target_ms),
        tpot_target_s=None if tier.tpot_target_ms is None else tier.tpot_target_ms / 1000,
        queue_deadline_s=after(tier.accepted_within_ms),
        max_context_tokens=tier.max_context_tokens,
    )


def drive(coroutine: Any) -> None:
    """Runs what waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something, and there is no loop")


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What there is: engines, zones, and gateways, each attached to all engines or to `subset` of them."""

    num_engines: int
    num_zones: int = 1
    num_gateways: int = 1
    subset: int = 0


class VirtualFleet:
    """Everything of one run. `serve` takes the arrivals; further events are put on `clock` before."""

    def __init__(
        self,
        plan: FleetPlan,
        setup: EngineSetup,
        tiers: Tiers,
        config: GatewayConfig,
        *,
        seed: int = 0,
        skips: bool = True,
    ) -> None:
        self.plan = plan
        self.clock = Clock()
        self._tiers, self._prompts = tiers, PromptMaker()
        self._longest, self._front_s = setup.memory.max_model_len, setup.front_s
        self.served: list[ServedRequest] = []
        self.num_open = 0
        # When the last request had its last word.
        self.ended_s = 0.0
        self._numbers = itertools.count(1)
        self._sampling: dict[int, SamplingParams] = {}
        self.nodes = [
            EngineNode(index, index % plan.num_zones, setup, self.clock, seed, skips=skips)
            for index in range(plan.num_engines)
        ]
        self.gateways = [
            VirtualGateway(f"gateway-{index}", self.clock, config, self._ended)
            for index in range(plan.num_gateways)
        ]
        for index, gateway in enumerate(self.gateways):
            nodes = subset_of(self.nodes, index, plan)
            gateway.set_engines([each.target for each in nodes])
            by_target = {each.target: each for each in gateway.fleet.attachments}
            for node in nodes:
                attachment = by_target[node.target]
                assert isinstance(attachment, VirtualAttachment)
                node.attachments.append(attachment)

    def start(self, nodes: Iterable[EngineNode] | None = None) -> None:
        """These engines, or all, are ready now."""
        for node in self.nodes if nodes is None else nodes:
            if not node.is_up:
                node.begin()
        for gateway in self.gateways:
            gateway.engine_ready()

    def lose_zone(self, zone: int) -> None:
        """All of its engines die at once."""
        for node in self.nodes:
            if node.zone == zone:
                node.end()

    def serve(self, arrivals: Sequence[ArrivingRequest], until_s: float = math.inf) -> list[ServedRequest]:
        """Runs to the end of the last request; what became of each, in their order."""
        self._arrive(iter(arrivals))
        self.clock.run(until_s)
        for node in self.nodes:
            node.account()
        return self.served

    def _arrive(self, arrivals: Any) -> None:
        """Only the next one is on the clock, however many there are."""
        arrival = next(arrivals, None)
        if arrival is None:
            return

        def come() -> None:
            self._submit(arrival)
            self._arrive(arrivals)

        self.clock.call_at(arrival.at_s + self._front_s, come)

    def _submit(self, arrival: ArrivingRequest) -> None:
        number = next(self._numbers)
        tier = self._tiers.named(arrival.tier or self._tiers.own_tier(arrival.tenant))
        served = ServedRequest(arrival, tier)
        self.served.append(served)
        self.num_open += 1
        sampling = self._sampling.get(arrival.output_tokens)
        if sampling is None:
            sampling = SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)
            self._sampling[arrival.output_tokens] = sampling
        promise = Promise(
            tier, arrival.tenant, tier.config.weight * self._tiers.tenant_weight(arrival.tenant), arrival.at_s
        )
        submission = Submission(
            context=promise,
            prompt_token_ids=self._prompts.ids(arrival, number),
            sampling=sampling,
            request_id=str(number),
            cache_salt=arrival.tenant.encode(),
            pool=tier.config.pool,
            model=_MODEL,
            checkpoint=_MODEL,
        )
        self.gateways[number % len(self.gateways)].submit(submission, served)

    def _ended(self, served: ServedRequest) -> None:
        self.num_open -= 1
        self.ended_s = max(self.ended_s, served.end_s)

    @property
    def engine_s(self) -> float:
        """Seconds for which engines were there, all of them together."""
        return math.fsum(node.held_s for node in self.nodes)


def subset_of(nodes: Sequence[EngineNode], gateway: int, plan: FleetPlan) -> list[EngineNode]:
    """The engines that one gateway is attached to: all, or as many as the plan's subsets have. Gateways take
    them in turns, so that each engine has as many gateways as any other, or one more (Google's SRE book,
    "deterministic subsetting", without its shuffling: engines of one zone do not lie together here).
    """
    if not plan.subset or plan.subset >= len(nodes):
        return list(nodes)
    first = gateway * plan.subset
    return [nodes[(first + offset) % len(nodes)] for offset in range(plan.subset)]
