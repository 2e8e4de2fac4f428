"""Endpoints that change which adapters are served, under the names that vLLM has for them. For the tenants
that `gateway.admin_tenants` names.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from contract.errors import MillraceError, Reason, invalid
from gateway.engines.adapters import AdapterNames
from gateway.faces.openai.answer_types import AdapterCard, AdapterList, Done
from gateway.http.body import decode
from gateway.http.exchange import Exchange
from gateway.models.catalog import ServedModel
from gateway.pipeline.pipeline import Pipeline
from runtime.models import ADAPTER_SEPARATOR

_encode = msgspec.json.Encoder().encode


class LoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/load_lora_adapter: `model:adapter`, or the adapter alone where one model is served."""

    lora_name: str
    # Folder in PEFT's form, as engines see it.
    lora_path: str


class UnloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    # vLLM's number of the adapter, which nobody needs.
    lora_int_id: int | None = None


_LOAD, _UNLOAD = msgspec.json.Decoder(LoadBody), msgspec.json.Decoder(UnloadBody)


class AdapterEndpoints:
    """Handlers of operators."""

    def __init__(self, pipeline: Callable[[], Pipeline], admin_tenants: tuple[str, ...]) -> None:
        self._pipeline = pipeline
        self._admins = frozenset(admin_tenants)

    async def load(self, exchange: Exchange) -> None:
        """POST /v1/load_lora_adapter."""
        self._check(exchange)
        body = decode(_LOAD, exchange.take_body())
        served, name = self._named(body.lora_name)
        await self._adapters.add(served.key, name, body.lora_path)
        await self._done(exchange, served, name, "is served")

    async def unload(self, exchange: Exchange) -> None:
        """POST /v1/unload_lora_adapter."""
        self._check(exchange)
        body = decode(_UNLOAD, exchange.take_body())
        served, name = self._named(body.lora_name)
        await self._adapters.remove(served.key, name)
        await self._done(exchange, served, name, "takes no further requests")

    async def list(self, exchange: Exchange) -> None:
        """GET /v1/lora_adapters."""
        self._check(exchange)
        found: list[AdapterCard] = []
        for served in self._pipeline().catalog.served.values():
            found += [
                AdapterCard(id=f"{served.name}{ADAPTER_SEPARATOR}{name}", parent=served.name, root=each.path)
                for name, each in sorted(self._adapters.of(served.key).items())
                if each.version
            ]
        await exchange.respond(200, _encode(AdapterList(data=found)))

    def _check(self, exchange: Exchange) -> None:
        identity = exchange.verified_caller.identity
        if identity.tenant not in self._admins:
            raise MillraceError(
                Reason.TENANT_NOT_ALLOWED,
                f"tenant {identity.tenant} may not change what is served; name it in gateway.admin_tenants",
            )

    def _named(self, text: str) -> tuple[ServedModel, str]:
        catalog = self._pipeline().catalog
        base, separator, name = text.rpartition(ADAPTER_SEPARATOR)
        if not separator and len(catalog.served) == 1:
            base = next(iter(catalog.served))
        served = catalog.any_of(base) if base else None
        if served is None or not name:
            known = ", ".join(catalog.served)
            raise invalid("lora_name", f"{text!r} is not model:adapter with one of the models {known}")
        return served, name

    @property
    def _adapters(self) -> AdapterNames:
        return self._pipeline().attempts.fleet.adapters

    async def _done(self, exchange: Exchange, served: ServedModel, name: str, what: str) -> None:
        await exchange.respond(200, _encode(Done(f"adapter {served.name}{ADAPTER_SEPARATOR}{name} {what}")))
