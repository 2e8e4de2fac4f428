"""What tokens cost, in whole billionths of the currency unit so that sums stay exact."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config import PriceConfig
from runtime.models import ADAPTER_SEPARATOR

NANOS_PER_UNIT = 1_000_000_000
# Prices are given per million tokens.
_NANOS_PER_PRICE = NANOS_PER_UNIT // 1_000_000
ANY_MODEL = "*"
_FREE = PriceConfig()


class Prices:
    """The configured prices. Models without a price, and without "*", cost nothing."""

    def __init__(self, prices: Mapping[str, PriceConfig]) -> None:
        self._prices = dict(prices)

    def replace(self, prices: Mapping[str, PriceConfig]) -> None:
        """Sets other prices, for what ends from now on."""
        self._prices = dict(prices)

    def of(self, model: str) -> PriceConfig:
        """Prices of `model`, in currency units per million tokens, and for an hour of an engine."""
        prices = self._prices
        # An adapter's tokens cost what its model's do, unless they have prices of their own.
        base = model.rpartition(ADAPTER_SEPARATOR)[0]
        return prices.get(model) or prices.get(base) or prices.get(ANY_MODEL) or _FREE

    def per_token_nanos(self, model: str) -> tuple[int, int, int]:
        """Billionths of a currency unit for one (prompt, cached prompt, completion) token."""
        price = self.of(model)
        return (_nanos(price.prompt), _nanos(price.cached_prompt), _nanos(price.completion))

    def cost_nanos(
        self, model: str, *, prompt_tokens: int, cached_prompt_tokens: int, billed_tokens: int
    ) -> int:
        """Cost of a finished request; cached tokens are part of the prompt's."""
        prompt, cached, completion = self.per_token_nanos(model)
        computed_tokens = prompt_tokens - cached_prompt_tokens
        return computed_tokens * prompt + cached_prompt_tokens * cached + billed_tokens * completion

    def engine_nanos(self, model: str, seconds: float) -> int:
        """What so many seconds of an engine cost."""
        return round(self.of(model).engine_hour * NANOS_PER_UNIT * seconds / 3600)


def _nanos(price: float) -> int:
    return round(price * _NANOS_PER_PRICE)
