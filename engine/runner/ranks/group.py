"""The leader's end of the ranks that share a model: starts the others, tells them what the shared memory does
not hold, and notices when one is gone.

Only `build` makes a group. The leader is the core itself, whose scheduler, sequence table, grammars and draws
are the only ones; the others have weights and a cache, and compute what its programs hand over.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from engine.adapters.peft import AdapterFile, Module
from engine.config import EngineConfig
from engine.model.back_end import Model
from engine.model.checkpoint import LoadRequest
from engine.model.expert_places import ExpertMove
from engine.model.kv_memory import num_slots
from engine.model.native_decoder import NativeDecoder
from engine.model.plan import PlanInput, num_logit_rows
from engine.model.spec import CheckpointError
from engine.runner.executors.executor import SPARE_COLUMNS
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import ROWS_AT_ONCE
from engine.runner.ranks.balance import ExpertBalance, KeepWeights
from engine.types import MemoryPlan
from kernels.native.library import NativeLibrary
from kernels.ranks.native import Ranks, RanksShape, shared_memory
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)

# What a rank answers to its task.
READY, REFUSED = range(2)
# How long a rank may take to end by itself, in seconds.
_STOP_GRACE_S = 2.0
# How long a rank may take to read its part of an adapter, in seconds: a stopped one would never answer, and
# where no step waits for it nobody else notices.
_ADAPTER_LIMIT_S = 30.0


class RankLostError(Exception):
    """The process of a rank ended while the model was loaded; the log has what it said."""


class Copies(NamedTuple):
    """Blocks, or slots of states, that a rank copies: (source, destination)."""

    pairs: Sequence[tuple[int, int]]
    are_states: bool = False


class SlotTask(NamedTuple):
    """An adapter of which a rank reads its part into a slot that no step computes with."""

    slot: int
    file: AdapterFile


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """What the process of a rank is told first."""

    rank: int
    # Of the native kernels, the same in all.
    level: str
    request: LoadRequest
    shape: RanksShape
    # Options of its KvStorage, and sequences whose newest keys it keeps.
    storage: dict[str, Any]
    num_slots: int


def ranks_shape(given: PlanInput, plan: MemoryPlan) -> RanksShape:
    """Room for the largest step that the configuration allows."""
    config = given.config
    experts = given.spec.experts
    longest = plan.max_model_len + config.speculation.num_draft_tokens
    return RanksShape(
        degrees=given.shard.degrees,
        max_tokens=config.scheduler.max_num_batched_tokens,
        max_sequences=config.scheduler.max_num_seqs,
        max_columns=-(-longest // plan.block_size) + SPARE_COLUMNS,
        max_rows=max(num_logit_rows(config), ROWS_AT_ONCE),
        hidden_size=given.spec.hidden_size,
        vocab_size=given.spec.vocab_size,
        num_active=0 if experts is None else experts.num_active,
        expert_width=0 if experts is None else experts.latent_size or given.spec.hidden_size,
        num_experts=0 if experts is None else experts.num_experts,
        sparse_cuts=_sparse_cuts(given),
    )


def _sparse_cuts(given: PlanInput) -> tuple[int, ...]:
    """By stage the first of all layers whose experts may change ranks, and their number."""
    experts = given.whole.experts
    if experts is None or given.shard.degrees.expert == 1:
        return (0,)
    cuts = given.shard.cuts or (0, given.whole.num_layers)
    return tuple(sum(layer < cut for layer in experts.layers) for cut in cuts)


def of_a_rank(config: EngineConfig) -> EngineConfig:
    """What one rank computes with: its part of the threads."""
    return msgspec.structs.replace(config, num_threads=config.num_threads // config.parallel.degrees.size)


class RankGroup:
    """The ranks behind the first. `on_lost` is called in a thread when one of them ends by itself."""

    def __init__(self, given: PlanInput, plan: MemoryPlan, on_lost: Callable[[str], None]) -> None:
        self._shape = ranks_shape(given, plan)
        self._whole = given.whole
        self._storage: dict[str, Any] = {
            "num_blocks": plan.num_blocks,
            "block_size": plan.block_size,
            "num_states": plan.num_states,
        }
        self._num_slots = num_slots(given.config)
        self._kv_dtypes = given.whole_kv_dtypes
        self._on_lost = on_lost
        self._ranks: Ranks | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._watchers: list[threading.Thread] = []
        self._closing = False
        # The loop tells of copies, and who loads adapters of these.
        self._telling = threading.Lock()
        # What the other ranks' layers are in the checkpoint, once they are ready.
        self.modules: dict[str, Module] = {}

    def start(self, request: LoadRequest, library: NativeLibrary) -> tuple[LoadRequest, Ranks]:
        """Starts the others, who begin to load their parts; returns what the leader's part of the load is,
        and its view of the shared memory. `request` is any rank's, but for the shard and its layers.
        """
        memory = shared_memory(self._shape)
        try:
            for rank in range(1, self._shape.num_ranks):
                connection = self._spawn(memory)
                own = self._request(request, rank)
                storage = self._storage | {"kv_dtype": own.shard.of_layers(self._kv_dtypes)}
                task = RankTask(
                    rank=rank,
                    level=library.level,
                    request=own,
                    shape=self._shape,
                    storage=storage,
                    num_slots=self._num_slots,
                )
                connection.send(task)
            self._ranks = Ranks(library, self._shape, 0, memory)
        except OSError as error:
            self.close()
            raise RankLostError(f"ranks could not be started: {error}") from error
        finally:
            os.close(memory)
        return self._request(request, 0), self._ranks

    def _request(self, request: LoadRequest, rank: int) -> LoadRequest:
        shard = msgspec.structs.replace(request.shard, rank=rank)
        return msgspec.structs.replace(request, shard=shard, spec=shard.model(self._whole))

    def _spawn(self, memory: int) -> Connection:
        ours, theirs = Pipe()
        flags = ("-P",) if sys.flags.safe_path else ()
        level = logging.getLevelName(_log.getEffectiveLevel()).lower()
        fds = (theirs.fileno(), memory)
        arguments = ("-m", "engine.runner.ranks.worker", *map(str, fds), "--log-level", level)
        process = subprocess.Popen(
            [sys.executable, *flags, *arguments], pass_fds=fds, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)
        return ours

    def wait_until_ready(self) -> None:
        """Returns when all have loaded; from then on they are watched. Raises ConfigError (CheckpointError)
        for what one of them refuses, and RankLostError.
        """
        for rank, (process, connection) in enumerate(zip(self._processes, self._connections, strict=True), 1):
            try:
                kind, *said = connection.recv()
            except (OSError, EOFError) as error:
                raise RankLostError(
                    f"rank {rank} ended while it loaded ({_end_of(process.wait())})"
                ) from error
            if kind == REFUSED:
                is_checkpoint, text = said
                raise (CheckpointError if is_checkpoint else ConfigError)(text)
            (modules,) = said
            self.modules |= modules
        for rank, process in enumerate(self._processes, 1):
            watcher = threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._closing or self._ranks is None:
            return
        self._on_lost(f"rank {rank} of {self._shape.num_ranks} ended ({_end_of(status)})")
        # Where this process goes on, nobody waits for that rank any more.
        self._ranks.end()

    def tell(self, message: Copies | SlotTask | ExpertMove | KeepWeights) -> None:
        """Has all do before the step that is handed over next what the message says. Called in any thread."""
        assert self._ranks is not None, "started before"
        with self._telling:
            for connection in self._connections:
                try:
                    connection.send(message)
                except OSError as error:
                    # Its watcher ends the engine.
                    _log.warning("a rank was not told of %s: %s", type(message).__name__, error.strerror)
            self._ranks.num_messages += 1
        if isinstance(message, SlotTask):
            # Nobody hands a step over where all requests wait for this adapter.
            self._ranks.wake()

    def balance(self, model: Model, is_settled: Callable[[], bool]) -> ExpertBalance | None:
        """What has experts change ranks, where they may; `model` is the leader's part. See ExpertBalance."""
        assert self._ranks is not None, "started before"
        assert isinstance(model, NativeDecoder), "which alone is shared"
        exchange = model.expert_exchange
        return None if exchange is None else ExpertBalance(self._ranks, exchange, self.tell, is_settled)

    def adapter_answers(self) -> list[str]:
        """Why each of the others could not read the adapter that they were told of last, else "". Where one
        says nothing, the engine ends.
        """
        found = []
        for rank, connection in enumerate(self._connections, 1):
            try:
                if not connection.poll(_ADAPTER_LIMIT_S):
                    silent = f"rank {rank} of {self._shape.num_ranks} read no adapter in {_ADAPTER_LIMIT_S} s"
                    self._on_lost(silent)
                    found.append(silent)
                    continue
                found.append(connection.recv())
            except (OSError, EOFError) as error:
                # As above.
                found.append(f"rank {rank} is gone: {type(error).__name__}")
        return found

    def close(self) -> None:
        """Ends the others; further calls do nothing."""
        self._closing = True
        if self._ranks is not None:
            self._ranks.end()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for watcher in self._watchers:
            watcher.join()
        self._connections, self._processes, self._watchers = [], [], []


def _end_of(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"


class RankedStorage(KvStorage):
    """The leader's cache, whose blocks and states the other ranks have for their heads."""

    def __init__(self, group: RankGroup, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._group = group

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy_blocks(pairs)
        self._group.tell(Copies(pairs))

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy_states(pairs)
        self._group.tell(Copies(pairs, are_states=True))

    def close(self) -> None:
        super().close()
        self._group.close()
