"""Keeps the catalog as the file says, while requests run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from gateway.limits.prices import Prices
from gateway.models.catalog import Catalog, ServedModel
from gateway.settings import Settings, load_live, priced
from gateway.tokenizer.client import TokenizerClient
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from runtime.models import Models, Source, replaced

_log = logging.getLogger(__name__)


class ModelKeeper:
    """Loads vocabularies, and takes what changes. `run` until cancelled."""

    def __init__(
        self, settings: Settings, catalog: Catalog, tokenizer: TokenizerClient, prices: Prices
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._tokenizer = tokenizer
        self._prices = prices
        # By version.
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def run(self, source: Source, on_change: Callable[[], None]) -> None:
        """Follows the file; `on_change` is called when another model can be asked."""
        self._load_missing(on_change)
        try:
            await source.follow(partial(self._apply, on_change))
        finally:
            for task in self._loading.values():
                task.cancel()

    async def _apply(self, on_change: Callable[[], None], tables: dict[str, Any]) -> None:
        models = load_live(tables, self._settings)
        if problem := replaced(self._catalog.models, models):
            raise ConfigError(problem)
        _log.info("models: %s", ", ".join(models.models))
        self._catalog.replace(models)
        self._prices.replace(priced(self._settings.gateway, models))
        self._load_missing(on_change)

    def _load_missing(self, on_change: Callable[[], None]) -> None:
        models: Models = self._catalog.models
        wanted = {each.key: each for each in models.models.values() if self._catalog.lacks(each)}
        for key in self._loading.keys() - wanted.keys():
            self._loading.pop(key).cancel()
        for key in wanted.keys() - self._loading.keys():
            loading = self._load(wanted[key], on_change)
            self._loading[key] = asyncio.create_task(loading, name=f"vocabulary of {key}")

    async def _load(self, model: ModelConfig, on_change: Callable[[], None]) -> None:
        def failed(why: str) -> None:
            self._catalog.failures[model.served_name] = why
            on_change()

        vocabulary = await self._tokenizer.wait_for_vocabulary(model.key, failed)
        self._loading.pop(model.key, None)
        # The model's table in the file may have changed meanwhile.
        config = self._catalog.models.models.get(model.served_name, model)
        self._catalog.loaded(ServedModel(config if config.key == model.key else model, vocabulary))
        on_change()
