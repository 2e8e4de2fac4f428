"""The paged cache's tensors, of the size that the plan says, slots of states, and copies of both."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.kv_memory import KvDtypes, by_layer
from engine.model.spec import ModelSpec
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.types import SchedulerOutput
from kernels.host import Device, HostDevice, Values, address_of, advise, on_device
from kernels.paged_cache.host import BY_CHANNEL, allocate_host_layer
from kernels.recurrent.store import JointCache, NoCache, allocate_states

# Memory of the cache is had from the system before a step writes there.
# A page is zeroed when it is first written, and on a virtual machine the host has to find it first: 6 ms
# for a huge page were measured, and the layers' pages fall due together, since every layer's cache grows by
# the same blocks. A thread takes them a bounded way ahead of the blocks in use. A step that is quicker than
# the thread takes its pages itself.
# Shape letters: N blocks.

_log = logging.getLogger(__name__)

# Linux 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23
# Bytes of one tensor that are taken in one call: the thread holds nothing for longer than a huge page takes.
_PIECE_BYTES = 2 << 20


class Prefault:
    """Keeps `ahead_blocks` blocks beyond those in use written by the system. Ids in use grow from 0.

    `tensors` [N, ...] are contiguous, in host memory, and live as long as this.
    """

    def __init__(
        self,
        tensors: Sequence[Values],
        *,
        ahead_blocks: int,
        most: int | None = None,
        populate: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`most`: blocks that there is memory for, where there are more ids. `populate` takes an address
        and a size in bytes, and says whether the system knows how.
        """
        self._tensors = tensors
        self._num_blocks = min(tensor.shape[0] for tensor in tensors)
        if most is not None:
            self._num_blocks = min(self._num_blocks, most)
        self._ahead_blocks = ahead_blocks
        self._populate = populate or _populate_write
        self._changed = threading.Condition()
        self._closing = False
        self._wanted = min(self._num_blocks, ahead_blocks)
        # Blocks whose memory is there.
        self.num_blocks = 0
        self._thread = threading.Thread(target=self._work, name="prefault", daemon=True)
        self._thread.start()

    def use(self, num_blocks: int) -> None:
        """Blocks up to this number are in use."""
        wanted = min(self._num_blocks, num_blocks + self._ahead_blocks)
        if wanted > self._wanted:
            with self._changed:
                self._wanted = wanted
                self._changed.notify()

    def leave_out(self, blocks: Sequence[int]) -> None:
        """Ends before these, whose memory goes; what comes after is had when it is first written."""
        with self._changed:
            self._num_blocks = min(self._num_blocks, *blocks)
            self._wanted = min(self._wanted, self._num_blocks)

    def close(self) -> None:
        """Ends the thread; the tensors may go afterwards."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        if hasattr(os, "SCHED_BATCH"):
            # It interrupts nobody when it wakes. But its weight stays that of the others: it holds the
            # interpreter's lock now and then, and the kernel's lock of the address space in every call, and
            # with a lower priority it would hold them for seconds where other processes take all cores.
            # A sandbox may forbid it. 0 is this thread.
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        step = max(1, min(_PIECE_BYTES // max(1, tensor[0].nbytes) for tensor in self._tensors))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted > self.num_blocks)
                end = min(self._wanted, self.num_blocks + step)
            for tensor in self._tensors:
                if self._closing:
                    return
                size = tensor[0].nbytes
                begin = (address_of(tensor) + self.num_blocks * size) // mmap.PAGESIZE * mmap.PAGESIZE
                if not self._populate(begin, address_of(tensor) + end * size - begin):
                    _log.info("this system gives memory when it is first written, not before")
                    return
            self.num_blocks = end


_Pairs = Sequence[tuple[int, int]]


def _populate_write(address: int, num_bytes: int) -> bool:
    return advise(address, num_bytes, _MADV_POPULATE_WRITE)


if TYPE_CHECKING:
    import torch

    from engine.runner.block_transfers import BlockTransfers
    from kernels.paged_cache.store import LayerCache


class SlotMoves(NamedTuple):
    """Copies (source, destination), none of which is both, in main memory [M, 2]: slots; and of keys that are
    rounded by channel their places among the newest, and blocks of which the last slot is copied.
    """

    slots: NDArray[np.int64]
    recents: NDArray[np.int64]
    blocks: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[SlotMoves]) -> SlotMoves:
        """All of them."""
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))


class KvStorage:
    """A LayerCache for each layer, and room for `host_blocks` blocks and `host_states` states in host memory
    (the offload tier). On a CPU the memory of `ahead_blocks` blocks beyond those in use is had from the
    system while cores are idle.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: KvDtypes,
        device: Device,
        host_blocks: int = 0,
        host_states: int = 0,
        ahead_blocks: int = 0,
        num_states: int = 0,
        num_window_blocks: int = 0,
        num_scratch_blocks: int = 0,
        present: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """`num_states`: slots of the layers that have states. `num_window_blocks`: blocks of those that have
        a window, where others have none; 0 where all keep the same. `num_scratch_blocks`: blocks behind the
        spare one, which no plan knows. `present`: how many of both kinds there
        is memory for at first, where that follows the load.
        """
        self.num_blocks = num_blocks
        self.num_scratch_blocks = num_scratch_blocks
        self.block_size = block_size
        self.num_states = num_states
        self.num_window_blocks = num_window_blocks
        # Sequences whose newest keys are whole; 0 where no layer rounds keys by channel.
        self._num_recent = 0
        # Where layers with a window keep each block [N]: the spare block of theirs, until a plan says so.
        self.window_blocks: NDArray[np.int64] | None = None
        if num_window_blocks:
            self.window_blocks = np.full(num_blocks + 1, num_window_blocks, np.int64)
        self._device = device
        # Keys and values (HostCache for the native kernels, else LayerCache), a StateCache, or both; a layer
        # without memory of its own has that of another one.
        self.layers: list[Any] = []
        # Keys and values, each once.
        self._kept: list[Any] = []
        self._tensors: list[Any] = []
        self._window_tensors: list[Any] = []
        self._states: list[Any] = []
        for index, own in enumerate(by_layer(kv_dtype, spec.num_layers)):
            source = spec.cache_source(index)
            self.layers.append(self.layers[source] if source != index else self._layer(spec, index, own))
        self._by_channel = [each for each in self._kept if getattr(each, "channels", None) is not None]
        self._transfers: BlockTransfers | None = None
        # Of blocks without keys nothing moves.
        if host_blocks and self._tensors:
            self._transfers = _transfers(self._tensors, host_blocks, device)
        self._state_transfers: BlockTransfers | None = None
        if host_states:
            self._state_transfers = _transfers(self._states, host_states, device)
        ahead_blocks = ahead_blocks if device.type == "cpu" else 0
        self._prefault = _prefault(self._tensors, ahead_blocks, present[0])
        self._window_prefault = _prefault(self._window_tensors, ahead_blocks, present[1])

    def _layer(self, spec: ModelSpec, index: int, kv_dtype: str) -> Any:
        """What the layer `index` keeps."""
        layer: Any = NoCache()
        stored = spec.cache_shape(index)
        if stored is not None:
            in_windows = self.num_window_blocks > 0 and index in spec.sliding_layers
            num_blocks = self.num_window_blocks if in_windows else self.num_blocks + self.num_scratch_blocks
            shape = {"num_blocks": num_blocks, "block_size": self.block_size}
            shape |= msgspec.structs.asdict(stored)
            layer = (
                allocate_host_layer(**shape, type_name=kv_dtype)
                if isinstance(self._device, HostDevice)
                else _torch_layer(shape, kv_dtype, self._device)
            )
            layer.in_windows = in_windows
            self._kept.append(layer)
            (self._window_tensors if in_windows else self._tensors).extend(layer.tensors())
        if spec.state is None or index not in spec.state.layers:
            return layer
        state = allocate_states(spec.state.shape, self.num_states, self._device)
        self._states += state.tensors()
        return JointCache(keys=layer, state=state) if index in spec.attending else state

    @property
    def spare_slot(self) -> int:
        """A slot of the block that belongs to nobody; padding writes there."""
        return self.num_blocks * self.block_size

    @property
    def num_prefaulted_blocks(self) -> int:
        """Blocks from the first on whose memory is there ahead of their use."""
        return 0 if self._prefault is None else self._prefault.num_blocks

    def apply(self, plan: SchedulerOutput) -> None:
        """Moves the plan's blocks: offloads, restores, copies inside the cache. What runs on the device after
        this call finds them done.
        """
        if self._prefault is not None:
            for new in plan.new_sequences:
                self._prefault.use(1 + max(new.block_ids, default=-1))
            for sequence in plan.scheduled:
                if sequence.new_block_ids:
                    self._prefault.use(1 + max(sequence.new_block_ids))
        if plan.window_blocks:
            assert self.window_blocks is not None, "the scheduler knows of no window blocks either"
            blocks, kept = np.array(plan.window_blocks, np.int64).T
            self.window_blocks[blocks] = kept
            if self._window_prefault is not None:
                self._window_prefault.use(1 + int(kept.max()))
        if self._tensors and (plan.offloads or plan.restores):
            assert self._transfers is not None, "the scheduler knows of no host tier either"
            self._transfers.apply(plan.offloads, plan.restores)
        if plan.block_copies:
            self.copy_blocks(plan.block_copies)
        if plan.window_copies:
            _copy(self._window_tensors, plan.window_copies)
        if plan.state_offloads:
            self._move_states(plan.state_offloads, ())
        if plan.state_copies:
            self.copy_states(plan.state_copies)
        # Behind the copies, which may be of what is filled here.
        if plan.state_restores:
            self._move_states((), plan.state_restores)
        # Last, since copies may be of what goes.
        _give_back(self._tensors, plan.retired_blocks, self._prefault)
        _give_back(self._window_tensors, plan.retired_window_blocks, self._window_prefault)

    def copy_blocks(self, pairs: _Pairs) -> None:
        """Blocks (source, destination), none of which is both."""
        _copy(self._tensors, pairs)

    def keep_newest_keys(self, num_sequences: int) -> None:
        """Room for the newest keys of so many sequences, whole, in the layers that round them by channel."""
        for layer in self._by_channel:
            layer.keep_newest_keys(num_sequences)
            self._num_recent = num_sequences

    @property
    def keeps_newest_keys(self) -> bool:
        """Whether steps write over whole keys, without which one of more than a block cannot be repeated."""
        return self._num_recent > 0

    def recent_rows(
        self, slots: NDArray[np.int64], num_left: NDArray[np.int64] | int = 0
    ) -> NDArray[np.int64]:
        """Where the newest keys of sequences in slots [S] of the table are whole, in the layers that round
        them by channel, here or in another rank; of tables that left so many blocks [S] out.
        """
        if self._num_recent:
            assert slots.max(initial=0) < self._num_recent, f"{self._num_recent} sequences"
        return 2 * slots + num_left % 2

    def copy_slots(self, moves: SlotMoves) -> None:
        """Keys and values of slots, in main memory."""
        size = self.block_size
        for layer in self._kept:
            _copy_places(layer.by_slot(), moves.slots, size)
        for layer in self._by_channel:
            _copy_places([layer.recent], moves.recents, size)
            _copy([layer.keys, layer.channels], moves.blocks)

    def copy_states(self, pairs: _Pairs) -> None:
        """Slots of states (source, destination); all sources are read first."""
        _copy(self._states, pairs)

    def _move_states(self, offloads: _Pairs, restores: _Pairs) -> None:
        assert self._state_transfers is not None, "the scheduler knows of no states on the host either"
        self._state_transfers.apply(offloads, restores)

    def block_bytes(self) -> BlockBytes:
        """A way to the bytes of single blocks and states, those of window blocks left out."""
        return BlockBytes(self._tensors, self._states)

    def close(self) -> None:
        """Ends transfers and gives host memory back. No step is outstanding."""
        for prefault in (self._prefault, self._window_prefault):
            if prefault is not None:
                prefault.close()
        self._prefault = self._window_prefault = None
        for transfers in (self._transfers, self._state_transfers):
            if transfers is None:
                continue
            if self._device.type == "cuda":
                import torch

                torch.cuda.synchronize(self._device)  # type: ignore[arg-type]
            transfers.close()
        self._transfers = self._state_transfers = None


def _prefault(tensors: Sequence[Any], ahead_blocks: int, most: int | None) -> Prefault | None:
    return Prefault(tensors, ahead_blocks=ahead_blocks, most=most) if ahead_blocks and tensors else None


def _give_back(tensors: Sequence[Any], blocks: Sequence[int], prefault: Prefault | None) -> None:
    """Lets the system have the pages of blocks that nobody uses; those that others begin or end in stay."""
    if not blocks:
        return
    if prefault is not None:
        prefault.leave_out(blocks)
    runs = np.split(ordered := np.sort(np.array(blocks, np.int64)), np.flatnonzero(np.diff(ordered) > 1) + 1)
    for tensor in tensors:
        size, base = tensor[0].nbytes, address_of(tensor)
        for run in runs:
            begin = -(-(base + int(run[0]) * size) // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (base + (int(run[-1]) + 1) * size) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                advise(begin, end - begin, mmap.MADV_DONTNEED)


def _copy_places(tensors: Sequence[Any], pairs: NDArray[np.int64], size: int) -> None:
    """Places (source, destination) of blocks of `size`, whose axes are those of keys."""
    sources, targets = pairs.T
    for tensor in tensors:
        tensor[targets // size, :, targets % size] = tensor[sources // size, :, sources % size]


def _copy(tensors: Sequence[Any], pairs: _Pairs | NDArray[np.int64]) -> None:
    """Rows of every tensor, (source, destination); all sources are read first."""
    index = np.array(pairs, np.int64).T.copy()
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            tensor[index[1]] = tensor[index[0]]
        else:
            sources, targets = on_device(index, tensor.device)
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def _torch_layer(shape: dict[str, int], kv_dtype: str, device: torch.device) -> LayerCache:
    import torch

    from kernels.paged_cache.store import allocate_layer

    if kv_dtype == BY_CHANNEL:
        return allocate_layer(**shape, dtype="kivi4", device=device)
    # Of four bits torch has the name alone: what is allocated are bytes.
    dtype = torch.float8_e4m3fn if kv_dtype == "fp8" else getattr(torch, kv_dtype)
    return allocate_layer(**shape, dtype=dtype, device=device)


def _transfers(tensors: Sequence[Any], host_blocks: int, device: Device) -> BlockTransfers:
    """Moves blocks as tensors, over the same memory where these are arrays: who sets host memory apart for
    blocks pays for torch with it.
    """
    import torch

    from engine.runner.block_transfers import BlockTransfers
    from engine.runner.streams import streams_of

    if isinstance(device, HostDevice):
        tensors = [torch.from_numpy(tensor.view(np.uint8)) for tensor in tensors]
    return BlockTransfers(tensors, host_blocks, streams_of(tensors[0].device))
