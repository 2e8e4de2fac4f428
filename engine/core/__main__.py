"""The core process: loads the model, then steps until the front goes away. Started by the front only.

`python -m engine.core --fd N` with N the inherited end of a socket pair. It has an interpreter of its own, so
that gRPC, protobuf and tracing never take the GIL from a step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.core import messages
from engine.core.loop import EngineLoop
from engine.core.memory import MemoryWatch
from engine.core.messages import CoreSocket, PeerGone
from engine.core.warm_up import WarmUp
from engine.kv import NO_TIERS, PrefixTiers
from engine.runner.base import Builder
from engine.runner.prefix_disk.build import check_disk, open_disk
from engine.runner.prefix_peers.build import open_peers
from engine.scheduler import Scheduler
from engine.scheduler.adapters import AdapterLoader, AdapterSlots
from engine.types import NOT_MEASURED, MeasuredSpeed, MemoryPlan, ModelFacts
from observability.emit import logging as json_logging
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from runtime.memory import give_back, use_huge_pages

_log = logging.getLogger(__name__)

# Exit codes beyond 0: 2 is a configuration error, as for every main; 70 is a runner that broke.
_EXIT_CONFIG = 2
_EXIT_BROKEN = 70


def _builder(config: EngineConfig) -> tuple[Builder, Callable[[], object]]:
    """What builds the runner, and what is to be called once its first steps were measured. Imported only when
    asked for: this process imports no torch where the native kernels serve, because another one loads for it,
    or what it packed in an earlier start is read.
    """
    if config.simulated:
        from engine.runner import simulated

        return simulated.build, lambda: None
    from engine.model.kept_weights import KeptWeights
    from engine.runner.build import build

    kept = KeptWeights(config.packed_weights)
    made = functools.partial(build, load=kept.load, on_lost=_end, is_settled=lambda: kept.is_settled)
    return made, kept.write_later


def _end(cause: str) -> None:
    """A rank is gone, and with it this process, as if it had been killed itself: what it served goes on
    elsewhere.
    """
    _log.error("%s; the core ends", cause)
    sys.stderr.flush()
    os._exit(_EXIT_BROKEN)


def make_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    memory: MemoryPlan,
    facts: ModelFacts,
    speed: MeasuredSpeed = NOT_MEASURED,
    adapters: AdapterLoader | None = None,
    tiers: PrefixTiers = NO_TIERS,
) -> Scheduler:
    """The scheduler over the memory that the runner allocated."""
    return Scheduler(
        config.scheduler,
        config.cache,
        memory,
        model=model.path,
        num_host_blocks=memory.num_host_blocks(config.cache.host_bytes),
        window=facts.window,
        attention_balance=facts.attention_balance,
        whole_prompts=facts.whole_prompts,
        shares_prefixes=facts.shares_prefixes,
        speed=speed,
        adapters=None if adapters is None else AdapterSlots(config.adapters.num_slots, adapters),
        tiers=tiers,
    )


class ProgressReport:
    """Passes on the stages of start-up, but not every tensor of them; and counts the seconds of each, which
    lasts until another one begins.
    """

    def __init__(self, connection: CoreSocket, watch: MemoryWatch) -> None:
        self._connection = connection
        self._watch = watch
        self._stage = "read configuration"
        self._reported = 0.0
        self._since_s = time.monotonic()
        self.stages_s: dict[str, float] = {}

    def __call__(self, stage: str, fraction: float) -> None:
        """A part of a stage is done; reported when the stage is new, done, or another tenth further."""
        self._watch.stage(stage, fraction)
        if stage != self._stage or fraction - self._reported >= 0.1 or fraction >= 1 > self._reported:
            self.count()
            self._stage, self._reported = stage, fraction
            self._connection.send(messages.LoadProgress(stage, fraction))

    def count(self) -> None:
        """Books the time up to now under the present stage."""
        now = time.monotonic()
        self.stages_s[self._stage] = self.stages_s.get(self._stage, 0.0) + now - self._since_s
        self._since_s = now


def serve_core(connection: CoreSocket, for_blocks: socket.socket | None = None) -> int:
    """Loads and steps until a command stops it; the exit code. Raises PeerGone when the front ends.
    `for_blocks` leads to the front as well, where engines hand blocks to each other.
    """
    (start,) = _first_messages(connection)
    config, model = start.config, start.model
    builder, keep = _builder(config)
    watch = MemoryWatch()
    report = ProgressReport(connection, watch)
    try:
        check_disk(config.cache)
        runner, memory, facts = builder(config, model, report)
    except ConfigError as error:
        connection.send(messages.CoreRefused(str(error)))
        return _EXIT_CONFIG
    overlap = config.overlaps(facts.device.partition(":")[0])
    report("take the first steps", 0.0)
    scheduler = make_scheduler(config, model, memory, facts)
    warm_up = WarmUp(runner, scheduler, config, memory, facts, overlap=overlap)
    speed = NOT_MEASURED if config.simulated else warm_up.run()
    report.count()
    if warm_up.broken:
        return _EXIT_BROKEN
    keep()
    try:
        peers = open_peers(config, model, memory, facts, runner.block_bytes(), for_blocks)
        disk = open_disk(config, model, memory, facts, runner.block_bytes())
        tiers = PrefixTiers(disk=disk, peers=peers)
    except ConfigError as error:
        connection.send(messages.CoreRefused(str(error)))
        return _EXIT_CONFIG
    scheduler = make_scheduler(config, model, memory, facts, speed, runner.adapters, tiers)
    loop = EngineLoop(
        scheduler,
        runner,
        connection,
        overlap=overlap,
        work=facts.work,
        memory_use=lambda touched: watch.use(memory, max(touched, runner.num_prefaulted_blocks())),
    )
    _settle(watch)
    # The first load report comes before readiness, so that whoever asks finds one.
    loop.publish()
    connection.send(messages.Ready(memory, facts, report.stages_s, speed))
    try:
        loop.run()
    finally:
        for tier in (disk, peers):
            if tier is not None:
                tier.close()
        runner.close()
    return _EXIT_BROKEN if loop.broken else 0


def _settle(watch: MemoryWatch) -> None:
    # Objects of start-up live as long as the process, so garbage collections need not visit them.
    gc.collect()
    gc.freeze()
    give_back()
    watch.start()
    use_huge_pages()


def _first_messages(connection: CoreSocket) -> list[messages.Start]:
    while True:
        received = connection.receive(60.0)
        if received:
            return [message for message in received if isinstance(message, messages.Start)]


def main() -> int:
    """Runs until the front closes the socket or asks to stop."""
    parser = argparse.ArgumentParser(prog="python -m engine.core", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the front process")
    parser.add_argument("--blocks-fd", type=int, help="another one, for blocks of other engines")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    # A terminal's Ctrl-C reaches the whole group; the front decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    json_logging.configure("engine-core", arguments.log_level)
    connection = socket.socket(fileno=arguments.fd)
    for_blocks = None if arguments.blocks_fd is None else socket.socket(fileno=arguments.blocks_fd)
    try:
        return serve_core(CoreSocket(connection), for_blocks)
    except PeerGone:
        _log.info("the front is gone; the core ends")
        return 0
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
