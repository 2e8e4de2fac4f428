"""What a model's engines take by their memory plans, before one is started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from runtime.config import ModelConfig, read_tables
from runtime.errors import ConfigError
from runtime.models import own_model
from services.supervisor.layout import Layout


class MemoryPlans:
    """Of the models of one stack."""

    def __init__(self, layout: Layout, environ: Mapping[str, str] = os.environ) -> None:
        self._layout = layout
        self._environ = environ
        # What all models that are loaded on demand may take together; 0 while that is not known.
        self.budget_bytes = layout.settings.on_demand_bytes

    def bytes_of(self, model: ModelConfig) -> int:
        """What the model takes. Raises ConfigError where it cannot be loaded, or exceeds the budget."""
        # Whoever loads nothing on demand pays for none of it.
        from engine import config as engine
        from engine.model.device import choose_device
        from engine.model.plan import human, make_plan, plan_input

        layout, where = self._layout, f"models.{model.served_name}"
        settings = layout.engine_settings(model)
        tables = read_tables(layout.config, {**self._environ, **layout.environment, **settings})
        config = engine.load(tables)
        if config.simulated:
            return 0
        if config.make != "millrace":
            raise ConfigError(
                f'{where}.load = "on demand": what an engine of make {config.make!r} takes is not known '
                'before it is loaded; set load = "at start"'
            )
        device, available = choose_device(config)
        plan = make_plan(plan_input(config, own_model(tables), device=device, available_bytes=available))
        parts = (plan.weights_bytes, plan.adapter_bytes, plan.workspace_bytes, plan.kv_cache_bytes)
        num_bytes = max(1, model.engines) * sum(parts)
        if not self.budget_bytes:
            self.budget_bytes = int(available * config.cache.memory_fraction)
        if num_bytes > self.budget_bytes:
            raise ConfigError(
                f"{where}: its engines take {human(num_bytes)} by their memory plan, and models that are "
                f"loaded on demand may take {human(self.budget_bytes)} together "
                "(supervisor.on_demand_bytes); raise it, quantize the model, or set "
                "engine.cache.kv_cache_bytes"
            )
        return num_bytes
