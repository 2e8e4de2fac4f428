"""Changes what a running stack serves, as its configuration file changes: engines of new models start before
gateways learn of them, and those of models that went end when no gateway sends them anything more.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

from runtime.config import MODELS_FILE_VARIABLE, ModelConfig
from runtime.errors import ConfigError
from runtime.models import Models, Source, replaced
from services.supervisor.checks import check_checkpoint, check_live
from services.supervisor.config import Options
from services.supervisor.health import wait_model
from services.supervisor.layout import Layout
from services.supervisor.models import resolve_models, served_tables, write_models
from services.supervisor.on_demand import OnDemand
from services.supervisor.ports import release
from services.supervisor.process import ProcessSpec
from services.supervisor.stack import Stack, StartFailed

# How long gateways may take to see a change, and the tokenizer service to load a vocabulary, in seconds.
_FOLLOW_LIMIT_S = 60.0
# Requests that were on their way to an engine have reached it after so long.
_NOTICE_S = 2.0


class Rollout:
    """Follows the file of one stack."""

    def __init__(
        self,
        stack: Stack,
        options: Options,
        on_demand: OnDemand | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._on_demand = on_demand
        self._stack = stack
        self._layout: Layout = stack.layout
        self._options = options
        self._environ = environ
        self._source = Source(self._layout.config, environ)
        self._models = self._layout.models
        # The version that each engine serves.
        each = self._models.models.values()
        keys = [model.key for model in each for _ in range(self._layout.num_engines(model))]
        self._serves = dict(zip(stack.engines, keys, strict=True))

    async def run(self) -> None:
        """Until it is cancelled. A change that cannot be followed is announced, and changes nothing."""
        await self._source.follow(self._apply)

    async def _apply(self, tables: dict[str, Any]) -> None:
        try:
            await self._change(tables)
        except (ConfigError, StartFailed, TimeoutError) as error:
            self._stack.announce(f"the changed configuration is not followed: {error}")

    async def _change(self, tables: dict[str, Any]) -> None:
        # A checkpoint may have to be downloaded.
        models = await asyncio.to_thread(resolve_models, self._options, tables, self._environ)
        if problem := replaced(self._models, models):
            raise ConfigError(problem)
        self._check(models, tables)
        if self._on_demand is not None:
            self._on_demand.replace(models.models.values())
        served = set(self._serves.values())
        wanted = {model.key: model for model in models.models.values()}
        await self._add(wanted)
        self._stack.tell_engines()
        write_models(self._layout.state_directory, models, tables)
        self._models = models
        await self._followed(wanted.keys() - served, served - wanted.keys())
        await self._remove(wanted)
        self._stack.announce(f"serving {', '.join(models.models)}")

    def _check(self, models: Models, tables: Mapping[str, Any]) -> None:
        environ = {**self._environ, **self._layout.environment, MODELS_FILE_VARIABLE: ""}
        check_live(self._layout, environ, served_tables(models, tables))
        if not self._options.simulated:
            for model in models.models.values():
                check_checkpoint(model.path)

    async def _add(self, wanted: Mapping[str, ModelConfig]) -> None:
        have, specs = Counter(self._serves.values()), dict[str, ProcessSpec]()
        for key, model in wanted.items():
            for _ in range(self._layout.num_engines(model) - have[key]):
                (spec,) = self._stack.further_engines(model, 1)
                specs[spec.name] = spec
                self._serves[spec.name] = key
        try:
            await self._stack.add_engines(list(specs.values()))
        except BaseException:
            for name in specs:
                del self._serves[name]
                release(self._layout.addresses.pop(name, {}).values())
            raise

    async def _followed(self, came: Set[str], went: Set[str]) -> None:
        """Until every gateway sends requests to what came, and none to what went."""
        for gateway in self._layout.gateways:
            for key in came:
                await wait_model(gateway, key, served=True, limit_s=_FOLLOW_LIMIT_S)
            for key in went:
                await wait_model(gateway, key, served=False, limit_s=_FOLLOW_LIMIT_S)

    async def _remove(self, wanted: Mapping[str, ModelConfig]) -> None:
        have, surplus = Counter(self._serves.values()), list[str]()
        for name, key in reversed(self._serves.items()):
            allowed = self._layout.num_engines(wanted[key]) if key in wanted else 0
            if have[key] > allowed:
                have[key] -= 1
                surplus.append(name)
        if not surplus:
            return
        await asyncio.sleep(_NOTICE_S)
        for name in surplus:
            del self._serves[name]
        await self._stack.withdraw_engines(surplus, _NOTICE_S)
