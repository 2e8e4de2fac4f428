"""The process of a rank behind the first: loads its part of the model, then computes what the leader hands
over.

`python -m engine.runner.ranks.worker CONNECTION MEMORY` with two inherited descriptors. It has no scheduler,
no sequence table and draws nothing; it ends with the leader, or when that says so.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import signal
import sys
from multiprocessing.connection import Connection

import numpy as np

from engine.adapters.build import native_slots
from engine.adapters.store import modules_of
from engine.model.back_end import load_model
from engine.model.expert_places import ExpertMove
from engine.model.forward_batch import ForwardBatch
from engine.model.kept_weights import KeptWeights
from engine.model.native_decoder import NativeDecoder
from engine.model.records import Floats
from engine.model.spec import CheckpointError
from engine.runner.kv_storage import KvStorage
from engine.runner.ranks.adapters import RankAdapters
from engine.runner.ranks.balance import KeepWeights
from engine.runner.ranks.group import READY, REFUSED, Copies, RankTask, SlotTask
from kernels.attention.ragged import RaggedBatch
from kernels.host import HOST
from kernels.native.library import load_level
from kernels.ranks.native import FORWARD, Ranks
from observability.emit import logging as json_logging
from runtime.errors import ConfigError
from runtime.memory import keep_freed_memory, one_heap

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
# How long a rank sleeps at most before it looks whether its leader is still there, in seconds.
_NAP_S = 0.1


class Follower:
    """A rank's model and cache, and the leader's steps."""

    def __init__(
        self,
        model: NativeDecoder,
        storage: KvStorage,
        ranks: Ranks,
        connection: Connection,
        adapters: RankAdapters,
        kept: KeptWeights,
    ) -> None:
        self._model, self._storage, self._ranks = model, storage, ranks
        self._connection, self._adapters, self._kept = connection, adapters, kept
        self._num_read = 0
        # Hidden states [T, E] of the last forward.
        self._hidden: Floats = np.zeros((0, 0), np.float32)

    def follow(self) -> None:
        """Computes the next thing that is handed over, or waits for a moment. Raises EOFError when the leader
        is gone.
        """
        self._ranks.settled[self._ranks.rank] = self._kept.is_settled
        if not self._ranks.wait(_NAP_S):
            if self._connection.poll():
                self._read()
            # Nobody waits at present.
            self._kept.write_later()
            return
        while self._num_read < self._ranks.num_messages_before:
            self._read()
        if self._ranks.kind == FORWARD:
            self._hidden = self._model.forward(self._batch(), self._storage.layers, None)
        else:
            self._model.logits_of(self._hidden, self._ranks.rows())

    def _read(self) -> None:
        message = self._connection.recv()
        match message:
            case SlotTask():
                self._adapters.begin(message)
            case ExpertMove():
                assert self._model.expert_exchange is not None, "the leader has one"
                self._model.expert_exchange.take(message)
            case KeepWeights():
                self._kept.write_later()
            case Copies(pairs, are_states):
                (self._storage.copy_states if are_states else self._storage.copy_blocks)(pairs)
        self._num_read += 1

    def _batch(self) -> ForwardBatch:
        token_ids, positions, slots, query_starts, context_lens, recent_rows, block_tables = (
            self._ranks.arrays()
        )
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            ragged=RaggedBatch(
                query_starts=query_starts,
                context_lens=context_lens,
                block_tables=block_tables,
                block_size=self._storage.block_size,
            ),
            adapter_rows=self._ranks.adapter_rows(),
            states=self._ranks.states(),
            recent_rows=recent_rows,
        )


def serve(connection: Connection, memory: int) -> None:
    """Loads what the task says, and follows until all is over. Raises EOFError when the leader is gone."""
    task = connection.recv()
    assert isinstance(task, RankTask), "the leader's first word"
    one_heap()
    keep_freed_memory()
    library = load_level(task.level)
    library.usual_threads = task.request.config.num_threads
    ranks = Ranks(library, task.shape, task.rank, memory)
    kept = KeptWeights(task.request.config.packed_weights)
    try:
        model = load_model(
            task.request,
            device="cpu",
            library=library,
            progress=lambda stage, fraction: None,
            load=kept.load,
            ranks=ranks,
        )
    except ConfigError as error:
        connection.send((REFUSED, isinstance(error, CheckpointError), str(error)))
        return
    assert isinstance(model, NativeDecoder), "with a library"
    linears = native_slots(model, task.request.config.adapters, dtype=task.request.dtype)
    storage = KvStorage(task.request.spec, device=HOST, **task.storage)
    storage.keep_newest_keys(task.num_slots)
    connection.send((READY, modules_of(linears)))
    adapters = RankAdapters(linears, connection)
    follower = Follower(model, storage, ranks, connection, adapters, kept)
    try:
        while not ranks.is_over:
            follower.follow()
    finally:
        adapters.close()


def main() -> int:
    """Runs until the leader ends."""
    parser = argparse.ArgumentParser(prog="python -m engine.runner.ranks.worker", description=__doc__)
    parser.add_argument("connection", type=int, help="inherited socket to the leader")
    parser.add_argument("memory", type=int, help="inherited descriptor of the shared memory")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    # The front decides when an engine ends; and without its leader a rank has nothing to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    json_logging.configure("engine-rank", arguments.log_level)
    with Connection(arguments.connection) as connection:
        try:
            serve(connection, arguments.memory)
        except (ConnectionError, EOFError):
            _log.info("the leader is gone; the rank ends")
    return 0


if __name__ == "__main__":
    sys.exit(main())
