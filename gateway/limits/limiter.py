"""Tokens per minute, concurrent streams and monthly budgets of a request: reserve, extend, settle.

Bounds, for any number of clients and gateway processes that share one store:

- Tokens per minute: prompt plus the largest allowed answer is charged at admission, in the half second of the
  admission. The sum admitted in any 60 s never passes the limit. A request that does not bound its answer
  is charged `default_completion_tokens` at a time; while it runs the sum can pass the limit by at most what
  such streams generate, and nobody else is admitted until it is below again.
- Concurrent streams, which a request has as many of as sequences are computed for it: never more than the
  limit, as long as gateways renew their leases in time.
- Monthly limits: never passed, when prompts are reserved by their real token count: the answer is cut where
  the grant ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from gateway.config import LimitsConfig
from gateway.limits.prices import NANOS_PER_UNIT, Prices
from gateway.limits.refusals import is_cost_meter, limits_unavailable, refusal, stream_limit_name
from gateway.limits.store import (
    WINDOW_MS,
    Demand,
    LeaseDemand,
    LeaseReturn,
    LimitDirectory,
    LimitRefused,
    LimitStore,
    MeterChange,
    MeterDemand,
    Scope,
    Settlement,
    StoreLostError,
    WindowChange,
    WindowDemand,
    meter_key,
    month_of,
    requests_key,
    scopes_of,
    unix_s,
)
from gateway.tiers import Tier
from gateway.types.request import Identity

# Part of streams and of tokens per minute that lines of batches may have: who asks beside them finds room.
_OF_LINES = 0.75


class MeterCharge(msgspec.Struct, frozen=True):
    """A charge on a monthly meter, in the meter's unit (tokens or billionths of the currency unit)."""

    key: str
    limit: int
    prompt_cost: int
    cached_prompt_cost: int
    completion_cost: int
    # The sum of its charges so far.
    charged: int


class Charges(msgspec.Struct):
    """Everything that a reservation has charged and will have to correct."""

    # Id of the demand that charged it.
    operation: str = ""
    bucket: int = 0
    windows: list[WindowDemand] = []
    leases: list[LeaseReturn] = []
    meters: list[MeterCharge] = []
    # Completion tokens that are paid for, over all sequences.
    completion_tokens: int = 0
    # Sequences that are computed together, because their answers are chosen at the end.
    num_sequences: int = 1
    # The most that the request may generate by its own word; None when it does not say.
    asked_tokens: int | None = None


class Reservation:
    """Tokens, slots of streams and budget, held until `settle` or `cancel`; the first of them counts."""

    def __init__(self, limiter: TokenLimiter, charges: Charges) -> None:
        self._limiter = limiter
        self.charges = charges
        self.is_open = True

    def remaining_completion_budget(self) -> int | None:
        """Completion tokens that are paid for, in all; None when the request cannot go beyond them.

        A stream that gets there calls `extend`, and stops with finish reason BUDGET when that grants nothing.
        """
        charges = self.charges
        if charges.asked_tokens is not None:
            return charges.completion_tokens if self.is_short else None
        return charges.completion_tokens if charges.windows or charges.meters else None

    @property
    def is_short(self) -> bool:
        """Whether less is paid for than was asked for."""
        charges = self.charges
        return charges.asked_tokens is not None and charges.completion_tokens < charges.asked_tokens

    @property
    def tokens_per_sequence(self) -> int:
        """Completion tokens that are paid for of each of the sequences."""
        return self.charges.completion_tokens // self.charges.num_sequences

    async def extend(self) -> int:
        """Reserves more for a stream that has used up what is paid for; returns the tokens added, 0 for none.

        Tokens per minute are charged without asking, monthly limits only as far as they go.
        """
        return await self._limiter.extend_reservation(self) if self.is_open else 0

    async def settle(self, prompt_tokens: int, billed_tokens: int, *, cached_prompt_tokens: int = 0) -> None:
        """Replaces what was reserved by what was used and gives the slots of its streams back."""
        if self.is_open:
            self.is_open = False
            used = self._correction(prompt_tokens, cached_prompt_tokens, billed_tokens)
            await self._limiter.close_reservation(self, used)

    async def cancel(self) -> None:
        """Gives everything back: no engine has worked for the request."""
        if self.is_open:
            self.is_open = False
            await self._limiter.close_reservation(self, self._correction(0, 0, 0))

    def _correction(self, prompt_tokens: int, cached_tokens: int, billed_tokens: int) -> Settlement:
        tokens = prompt_tokens + billed_tokens
        windows = (
            WindowChange(window.key, self.charges.bucket, tokens - window.amount)
            for window in self.charges.windows
        )
        meters = (
            MeterChange(
                meter.key,
                (prompt_tokens - cached_tokens) * meter.prompt_cost
                + cached_tokens * meter.cached_prompt_cost
                + billed_tokens * meter.completion_cost
                - meter.charged,
            )
            for meter in self.charges.meters
        )
        return Settlement(
            windows=tuple(change for change in windows if change.delta),
            meters=tuple(change for change in meters if change.delta),
        )


# The `x-ratelimit-*` headers of OpenAI's API.


class WindowView(msgspec.Struct, frozen=True):
    """A window as last seen."""

    limit: int
    used: int
    # Seconds since the Unix epoch.
    seen_s: float

    @property
    def remaining(self) -> int:
        """What could still be charged."""
        return max(0, self.limit - self.used)


def window_headers(what: str, views: Sequence[WindowView], now_s: float) -> dict[str, str]:
    """Headers about "requests" or "tokens" per minute; the tightest of `views` counts."""
    if not views:
        return {}
    tightest = min(views, key=lambda view: view.remaining)
    # A window is empty again one window after its last charge.
    reset_s = max(0.0, WINDOW_MS / 1000 - (now_s - tightest.seen_s)) if tightest.used else 0.0
    return {
        f"x-ratelimit-limit-{what}": str(tightest.limit),
        f"x-ratelimit-remaining-{what}": str(tightest.remaining),
        f"x-ratelimit-reset-{what}": duration(reset_s),
    }


def duration(seconds: float) -> str:
    """OpenAI's form of a duration: "350ms", "1.5s", "1m0s"."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    text = f"{milliseconds / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


_log = logging.getLogger(__name__)


class TokenLimiter:
    """Reserves what a request may use before it runs, and settles what it did use."""

    def __init__(
        self,
        store: LimitStore,
        directory: LimitDirectory,
        prices: Prices,
        config: LimitsConfig,
        *,
        clock: Callable[[], float] = unix_s,
    ) -> None:
        self._store = store
        self._directory = directory
        self._prices = prices
        self._config = config
        self._clock = clock
        self._open_leases: set[LeaseReturn] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._views: dict[str, WindowView] = {}
        self._renewal: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to renew the leases of running streams."""
        self._renewal = asyncio.create_task(self._renew_leases(), name="limits-renewal")

    async def close(self) -> None:
        """Stops renewing and finishes settlements in flight. The store stays open."""
        if self._renewal is not None:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewal
        if self._settling:
            await asyncio.wait(self._settling)

    async def reserve(
        self,
        identity: Identity,
        prompt_tokens: int,
        max_completion_tokens: int | None,
        *,
        num_sequences: int = 1,
        num_streams: int = 1,
        tier: Tier | None = None,
        model: str = "",
        age_s: float | None = None,
    ) -> Reservation:
        """Reserves the prompt, the answer and the slots of `num_streams` streams, or nothing.

        `max_completion_tokens` None means that the request does not bound its answer. Of `num_sequences`
        that are computed together each may have so many, and each is granted as many as the others. With
        `age_s`, the seconds since it came, the request was counted among those of a minute, which a refusal
        for its streams gives back. Lines of batches are not counted so, and leave a part of streams and of
        tokens per minute to others. Raises TOKEN_RATE_EXCEEDED, CONCURRENCY_EXCEEDED or BUDGET_EXHAUSTED
        naming whose limit it is, and LIMITS_UNAVAILABLE when the store is lost and the policy is to refuse.
        """
        completion = max_completion_tokens
        if completion is None:
            completion = self._config.default_completion_tokens
        scopes = list(scopes_of(self._directory, identity.tenant, identity.key_id))
        leases = _leases(scopes, tier, num_streams)
        demand = self._demand(scopes, prompt_tokens, (completion, num_sequences), leases, model)
        charges = Charges(
            completion_tokens=completion * num_sequences,
            asked_tokens=None if max_completion_tokens is None else completion * num_sequences,
            num_sequences=num_sequences,
        )
        if not demand:
            return Reservation(self, charges)
        asked = demand
        if identity.in_batch:
            asked = _left_over(demand)
        elif age_s is not None and leases:
            counted = [scope for scope in scopes if scope.limits.requests_per_minute is not None]
            asked = replace(demand, counted=tuple(map(requests_key, counted)), age_ms=round(age_s * 1000))
        try:
            outcome = await self._store.acquire(asked)
        except StoreLostError as error:
            raise limits_unavailable() from error
        if isinstance(outcome, LimitRefused):
            raise refusal(outcome, asked)
        charges.operation, charges.bucket = demand.operation, outcome.bucket
        charges.windows = list(demand.windows)
        charges.leases = [lease.given_back for lease in demand.leases]
        for meter, units in zip(demand.meters, outcome.meter_units, strict=True):
            charges.completion_tokens = min(charges.completion_tokens, units * num_sequences)
            charges.meters.append(self._charge(meter, units, model))
        self._open_leases.update(charges.leases)
        for window, used in zip(demand.windows, outcome.window_sums, strict=True):
            self._views[window.key] = WindowView(window.limit, used, self._clock())
        return Reservation(self, charges)

    def unlimited(self) -> Reservation:
        """A reservation that has charged nothing and can be neither short nor spent."""
        return Reservation(self, Charges())

    def stream_limit(self, identity: Identity, tier: Tier) -> tuple[int, str] | None:
        """Most streams that one request may have, and which limit that is; None for any number."""
        scopes = list(scopes_of(self._directory, identity.tenant, identity.key_id))
        least = min(_leases(scopes, tier, 1), key=lambda lease: lease.limit, default=None)
        return None if least is None else (least.limit, stream_limit_name(least.key))

    def headers(self, identity: Identity) -> dict[str, str]:
        """`x-ratelimit-*-tokens` headers as of the last reservation under the same tenant or key."""
        scopes = scopes_of(self._directory, identity.tenant, identity.key_id)
        views = [self._views[key] for scope in scopes if (key := _tokens_key(scope)) in self._views]
        return window_headers("tokens", views, self._clock())

    async def extend_reservation(self, reservation: Reservation) -> int:
        """See Reservation.extend."""
        charges = reservation.charges
        chunk = self._config.default_completion_tokens
        if charges.asked_tokens is not None:
            chunk = min(chunk, charges.asked_tokens - charges.completion_tokens)
        try:
            granted = await self._extend_meters(charges, chunk)
        except StoreLostError as error:
            raise limits_unavailable() from error
        # Windows were charged at once with all that a request had asked for: only one without a bound adds.
        if granted and charges.asked_tokens is None and charges.windows:
            changes = tuple(WindowChange(window.key, charges.bucket, granted) for window in charges.windows)
            # While the store is lost, windows forget anyway: no reason to break a running stream.
            await self._settle(Settlement(windows=changes))
            charges.windows = [replace(window, amount=window.amount + granted) for window in charges.windows]
        charges.completion_tokens += granted
        return granted

    async def close_reservation(self, reservation: Reservation, settlement: Settlement) -> None:
        """See Reservation.settle. Completes even when the caller is cancelled meanwhile."""
        self._open_leases.difference_update(reservation.charges.leases)
        # Whoever settles it, this process or one after it: it counts once.
        operation = f"{reservation.charges.operation}-end"
        settlement = replace(settlement, leases=tuple(reservation.charges.leases), operation=operation)
        if not settlement:
            return
        if self._store.is_immediate:
            await self._settle(settlement)
            return
        task = asyncio.create_task(self._settle(settlement), name="limits-settle")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        await asyncio.shield(task)

    async def _settle(self, settlement: Settlement) -> None:
        try:
            await self._store.settle(settlement)
        except StoreLostError:
            # Windows forget within a minute and leases lapse; only a monthly meter stays too high.
            _log.warning(
                "limit store lost: a reservation was not settled", extra={"meters": settlement.meters}
            )

    def _demand(
        self,
        scopes: list[Scope],
        prompt_tokens: int,
        # Tokens of each sequence, and sequences.
        completion: tuple[int, int],
        leases: tuple[LeaseDemand, ...],
        model: str,
    ) -> Demand:
        windows, meters = [], []
        tokens, num_sequences = completion
        month = month_of(self._clock())
        for scope in scopes:
            limits = scope.limits
            if limits.tokens_per_minute is not None:
                amount = prompt_tokens + tokens * num_sequences
                windows.append(WindowDemand(_tokens_key(scope), limits.tokens_per_minute, amount))
            if limits.monthly_tokens is not None:
                key = meter_key(scope.key, "tokens", month)
                meters.append(MeterDemand(key, limits.monthly_tokens, prompt_tokens, num_sequences, tokens))
            if limits.monthly_budget is not None:
                key = meter_key(scope.key, "cost", month)
                prompt_cost, _, cost = self._prices.per_token_nanos(model)
                limit = round(limits.monthly_budget * NANOS_PER_UNIT)
                prompt = prompt_tokens * prompt_cost
                meters.append(MeterDemand(key, limit, prompt, cost * num_sequences, tokens))
        return Demand(tuple(windows), leases, tuple(meters))

    def _charge(self, meter: MeterDemand, units: int, model: str) -> MeterCharge:
        prompt_cost, cached_cost, completion_cost = 1, 1, 1
        if is_cost_meter(meter.key):
            prompt_cost, cached_cost, completion_cost = self._prices.per_token_nanos(model)
        return MeterCharge(
            key=meter.key,
            limit=meter.limit,
            prompt_cost=prompt_cost,
            cached_prompt_cost=cached_cost,
            completion_cost=completion_cost,
            charged=meter.base + units * meter.unit_cost,
        )

    async def _extend_meters(self, charges: Charges, chunk: int) -> int:
        if not charges.meters:
            return chunk
        wanted = tuple(MeterDemand(m.key, m.limit, 0, m.completion_cost, chunk) for m in charges.meters)
        outcome = await self._store.acquire(Demand(meters=wanted))
        if isinstance(outcome, LimitRefused):
            return 0
        charged = zip(charges.meters, outcome.meter_units, strict=True)
        charges.meters = [
            replace(meter, charged=meter.charged + units * meter.completion_cost) for meter, units in charged
        ]
        return min(outcome.meter_units)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / 3)
            leases = tuple(self._open_leases)
            if leases:
                try:
                    await self._store.renew(leases)
                except StoreLostError:
                    _log.warning("limit store lost: %d stream slots were not renewed", len(leases))


def _leases(scopes: list[Scope], tier: Tier | None, num_streams: int) -> tuple[LeaseDemand, ...]:
    limits = {f"{scope.key}:streams": scope.limits.max_concurrent_streams for scope in scopes}
    if tier is not None:
        limits[f"tier:{tier.name}:streams"] = tier.config.max_concurrency
    lease_id = secrets.token_hex(16)
    return tuple(
        LeaseDemand(key, limit, lease_id, num_streams)
        for key, limit in limits.items()
        if limit is not None and num_streams
    )


def _left_over(demand: Demand) -> Demand:
    """The same within what lines of batches may have of the limits, which one of them may exceed alone."""

    def part(limit: int, amount: int) -> int:
        return max(int(_OF_LINES * limit), min(amount, limit))

    return replace(
        demand,
        windows=tuple([replace(each, limit=part(each.limit, each.amount)) for each in demand.windows]),
        leases=tuple([replace(each, limit=part(each.limit, each.slots)) for each in demand.leases]),
    )


def _tokens_key(scope: Scope) -> str:
    return f"{scope.key}:tpm"
