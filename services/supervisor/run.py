"""From options to a stack that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console

from runtime import memory
from runtime.errors import ConfigError, described
from services.supervisor import speeds
from services.supervisor.checks import check_tables
from services.supervisor.config import Options, make_private, state_directory
from services.supervisor.layout import plan_layout
from services.supervisor.memory import MemoryPlans
from services.supervisor.on_demand import OnDemand
from services.supervisor.report import StartReport, summary
from services.supervisor.rollout import Rollout
from services.supervisor.stack import Stack, StartFailed
from services.supervisor.state import require_none_running

_EXIT_CONFIG = 2
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(options: Options, console: Console, environ: Mapping[str, str] = os.environ) -> int:
    """Starts a stack and runs it until SIGTERM, SIGINT or SIGHUP; the exit status.

    A second signal ends everything at once. 2 for a configuration that cannot work, 1 for a failed start.
    """
    try:
        state = state_directory(environ)
        require_none_running(state)
        make_private(state)
        layout = plan_layout(options, state, environ)
        check_tables(layout, environ)
        stack = Stack(layout, partial(_announce, console))
        on_demand = _on_demand(stack, environ)
    except ConfigError as error:
        _complain(console, str(error))
        return _EXIT_CONFIG
    except OSError as error:
        _complain(console, described(error))
        return _EXIT_CONFIG
    return asyncio.run(_run(stack, on_demand, options, console))


def _on_demand(stack: Stack, environ: Mapping[str, str]) -> OnDemand:
    """What loads models when they are asked for. Raises ConfigError for one that cannot be."""
    found = OnDemand(
        stack,
        stack.layout.loader,
        plans=MemoryPlans(stack.layout, environ),
        max_loaded=stack.layout.settings.on_demand_models,
    )
    found.replace(stack.layout.models.models.values())
    return found


async def _run(stack: Stack, on_demand: OnDemand, options: Options, console: Console) -> int:
    announce, layout = partial(_announce, console), stack.layout
    signals = _Signals()
    for warning in layout.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    announce(f"Starting {layout.model_names} with {len(layout.processes)} processes ...")
    try:
        with StartReport(console, tuple(spec.name for spec in layout.processes)) as report:
            starting = asyncio.create_task(stack.start(report))
            await asyncio.wait({starting, signals.first}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return 0
            starting.result()
            elapsed_s = report.elapsed_s
    except (ConfigError, StartFailed) as error:
        _complain(console, str(error))
        return error.code if isinstance(error, StartFailed) else _EXIT_CONFIG
    except OSError as error:
        _complain(console, described(error))
        return _EXIT_CONFIG
    finally:
        if not stack.healthy:
            await stack.kill()
    announce(summary(layout, stack.log_directory, stack.said))
    speeds.keep(layout.state_directory, speeds.of_engines(layout.engine_models, stack.said))
    announce(f"\nHealthy after {elapsed_s:.1f} s.")
    # It waits for days, and what it started with need not wait with it.
    gc.collect()
    memory.give_back()
    tasks = [
        asyncio.create_task(Rollout(stack, options, on_demand).run(), name="rollout"),
        asyncio.create_task(on_demand.run(), name="models on demand"),
    ]
    await signals.first
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await _stop(stack, signals, announce)
    return 0


def _announce(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _complain(console: Console, text: str) -> None:
    console.print(f"millrace: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


async def _stop(stack: Stack, signals: _Signals, announce: Callable[[str], None]) -> None:
    announce("Stopping; streams in flight may finish (once more Ctrl-C ends them).")
    stopping = asyncio.create_task(stack.stop())
    await asyncio.wait({stopping, signals.second}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        await stack.kill()
    announce("Stopped.")


class _Signals:
    """The first and the second request to stop, as futures."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        for each in (self.first, self.second):
            if not each.done():
                each.set_result(None)
                return
