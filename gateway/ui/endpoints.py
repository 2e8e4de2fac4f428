"""Handlers of what the page asks beside the APIs that it uses: whose key it is, its usage, what runs."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from contract.errors import MillraceError, Reason, invalid
from gateway.edge import Edge
from gateway.engines.fleet import Fleet
from gateway.faces.queries import Query
from gateway.http.exchange import Exchange
from gateway.ledger.usage import UsageRow
from gateway.ledger.writer import LedgerWriter
from gateway.pipeline.pipeline import Pipeline
from gateway.store.store import Store
from gateway.tiers import Tier
from gateway.types.request import Identity
from gateway.ui.answer_types import (
    Account,
    DeploymentStatus,
    TierCard,
    TokenPrices,
    UsageSum,
    UsageTable,
)
from gateway.ui.totals import MetricTotals, engine_cards
from observability.emit.metrics import Metrics

_encode = msgspec.json.Encoder().encode
ACCOUNT, USAGE, STATUS = "/v1/account", "/v1/usage", "/v1/status"
# Dimensions that a tenant may have its own usage by.
GROUPS = ("day", "model", "tier", "key", "adapter", "path", "outcome")


class AccountEndpoints:
    """Handlers for the caller's own tenant; `status` for those of `gateway.admin_tenants` alone."""

    def __init__(
        self,
        pipeline: Callable[[], Pipeline],
        *,
        edge: Edge,
        fleet: Fleet,
        store: Store | None,
        metrics: Metrics,
        admin_tenants: Sequence[str],
    ) -> None:
        self._pipeline = pipeline
        self._edge = edge
        self._fleet = fleet
        self._store = store
        self._metrics = metrics
        self._admins = frozenset(admin_tenants)
        # Sums over a month take long in a large ledger: one at a time of a gateway.
        self._summing = asyncio.Lock()

    async def account(self, exchange: Exchange) -> None:
        """GET /v1/account."""
        Query(exchange, ())
        pipeline, identity = self._pipeline(), exchange.verified_caller.identity
        tiers = self._edge.tiers
        allowed = [tiers.named(name) for name in tiers.allowed(identity) if name in tiers.all]
        answer = Account(
            tenant=identity.tenant,
            key=identity.key_id,
            tiers=list(map(_tier_card, allowed)),
            prices=self._priced(pipeline, identity),
            keeps_conversations=self._store is not None and self._store.keeps(identity.tenant),
            is_operator=identity.tenant in self._admins,
        )
        await exchange.respond(200, _encode(answer))

    def _priced(self, pipeline: Pipeline, identity: Identity) -> dict[str, TokenPrices]:
        found = {name: self._edge.prices.of(name) for name in pipeline.catalog.names(identity)}
        return {
            name: TokenPrices(
                prompt=price.prompt, cached_prompt=price.cached_prompt, completion=price.completion
            )
            for name, price in found.items()
        }

    async def usage(self, exchange: Exchange) -> None:
        """GET /v1/usage."""
        query = Query(exchange, ("by", "since"))
        by = query.text("by", "day")
        if by not in GROUPS:
            raise invalid("by", f"{by[:40]!r} is none of {', '.join(GROUPS)}")
        month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        since = query.number("since", int(month.timestamp()), least=0, most=2**32)
        rows: list[UsageRow] = []
        if isinstance(self._edge.ledger, LedgerWriter):
            self._edge.deferred.flush()
            tenant = exchange.verified_caller.identity.tenant
            rows = await self._sums(self._edge.ledger, by, since, tenant)
        answer = UsageTable(
            by=by,
            since=since,
            is_kept=isinstance(self._edge.ledger, LedgerWriter),
            data=[_usage_sum(by, row) for row in rows],
        )
        await exchange.respond(200, _encode(answer))

    async def _sums(self, ledger: LedgerWriter, by: str, since: int, tenant: str) -> list[UsageRow]:
        try:
            async with self._summing:
                return await asyncio.to_thread(ledger.usage, by, since_unix_ms=since * 1000, tenant=tenant)
        except SQLAlchemyError as error:
            raise MillraceError(
                Reason.STORE_UNAVAILABLE,
                "the ledger's database does not answer; try again",
                retry_after_s=1.0,
            ) from error

    async def status(self, exchange: Exchange) -> None:
        """GET /v1/status."""
        Query(exchange, ())
        tenant = exchange.verified_caller.identity.tenant
        if tenant not in self._admins:
            raise MillraceError(
                Reason.TENANT_NOT_ALLOWED,
                f"tenant {tenant} may not see what runs; its operator can add it to gateway.admin_tenants",
            )
        # It tells of whatever ended before it was asked for.
        self._edge.deferred.flush()
        answer = DeploymentStatus(
            gateway=f"{socket.gethostname()}-{os.getpid()}",
            at_s=time.monotonic(),
            tiers=MetricTotals(self._metrics).tiers(self._edge.tiers.all),
            engines=engine_cards(self._fleet.attachments),
        )
        await exchange.respond(200, _encode(answer))


def _tier_card(tier: Tier) -> TierCard:
    return TierCard(
        name=tier.name,
        service_tier=tier.openai_name,
        ttft_target_ms=tier.config.ttft_target_ms,
        tpot_target_ms=tier.config.tpot_target_ms,
    )


def _usage_sum(by: str, row: UsageRow) -> UsageSum:
    (group,), numbers = row.group, row.numbers
    if by == "day":
        group = datetime.fromtimestamp(group / 1000, UTC).date().isoformat()
    return UsageSum(
        group=str(group),
        num_requests=int(numbers["num_requests"]),
        computed_prompt_tokens=int(numbers["computed_prompt_tokens"]),
        cached_prompt_tokens=int(numbers["cached_prompt_tokens"]),
        completion_tokens=int(numbers["completion_tokens"] + numbers["candidate_tokens"]),
        cost=float(numbers["cost"]),
    )
