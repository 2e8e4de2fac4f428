"""Every interleaving of a hand-over, up to a depth: cancel, death, silence, duplicate and late message.

The books of both sides are the production's (`Pulls`, `Held`, `Pins`, `DiskReads`, `BlockPool`); memory and
network are small stand-ins. A block's memory is the name of what was written last. Reads and writes take two
moments each, between which anything else may happen. The network may lose, repeat, reorder and keep what it
carries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from engine.kv.block_pool import BlockPool
from engine.kv.disk import DiskRead
from engine.kv.disk_reads import DiskReads
from engine.kv.pins import Pins
from engine.runner.prefix_peers.books import Held, Pulls

DEPTH = 10
HASHES = (b"one", b"two")
TICKET = b"ticket"
# Enough for one prompt, and for somebody else.
NUM_BLOCKS = 4


class World:
    """Both engines, what is on its way, and how often what may happen without end has happened."""

    def __init__(self) -> None:
        # Sender: a prompt in two blocks, held; the request that computed it has ended.
        self.pool = BlockPool(NUM_BLOCKS, lambda block_id, block_hash: None)
        self.pins, self.held = Pins(self.pool), Held()
        blocks = [self.pool.allocate() for _ in HASHES]
        self.memory: list[bytes] = [b""] * NUM_BLOCKS
        for block_id, block_hash in zip(blocks, HASHES, strict=True):
            self.pool.register(block_id, block_hash)
            self.memory[block_id] = block_hash
        assert self.pins.hold(TICKET, blocks, 1.0)
        self.held.offer(TICKET, list(zip(HASHES, blocks, strict=True)))
        self.pool.release(blocks)
        # A read that has begun: (pull, index, block, what was seen there).
        self.reading: tuple[int, int, int, bytes] | None = None
        self.num_asked = 0
        # (token, index, content) on their way.
        self.network: list[tuple[int, int, bytes]] = []
        # Receiver.
        self.own = BlockPool(NUM_BLOCKS, lambda block_id, block_hash: None)
        self.reads = DiskReads(None, self.own, None, offers=self._offer, is_there=lambda block_hash: False)
        self.pulls = Pulls()
        self.own_memory: list[bytes] = [b""] * NUM_BLOCKS
        self.under_way: dict[int, DiskRead] = {}
        self.writing: tuple[int, int, bytes] | None = None
        self.num_pulls = 0
        # Blocks of somebody else, on either side.
        self.others: list[int] = []
        self.own_others: list[int] = []

    def _offer(self, block_id: int, block_hash: bytes, parent: bytes | None) -> None:
        self.own.register(block_id, block_hash)

    # What may happen.

    def actions(self) -> Iterator[tuple[str, Callable[[], object]]]:
        # The sender reads what the newest pull asks for, in order.
        if self.num_pulls and self.reading is None and self.num_asked < len(HASHES):
            yield "read", self.read
        if self.reading is not None:
            yield "send", self.send
        if self.pins.tickets:
            # Acknowledged, cancelled, too late, the receiver dead: one and the same.
            yield "release", self.release
        if not self.others and self.pool.num_available > 2:
            yield "other request at the sender", self.take
        if self.num_pulls < 2 and not self.under_way and self.own.num_available >= len(HASHES):
            yield "pull", self.pull
        for message in dict.fromkeys(self.network):
            if self.writing is None:
                yield f"deliver {message}", lambda message=message: self.deliver(message)
        if self.writing is not None:
            yield "written", self.written
        for token in self.under_way:
            # Its request is cancelled, the sender is silent or dead, time is over: one and the same.
            yield f"end {token}", lambda token=token: self.pulls.end(token, 0.0)
        if self.under_way:
            yield "plan", self.plan
        if not self.own_others and self.own.num_available:
            yield "other request at the receiver", self.take_own

    def read(self) -> None:
        block_id = self.held.find(TICKET, HASHES[self.num_asked])
        if block_id is not None:
            self.reading = (self.num_pulls, self.num_asked, block_id, self.memory[block_id])
        self.num_asked += 1

    def send(self) -> None:
        assert self.reading is not None
        (token, index, block_id, seen), self.reading = self.reading, None
        if self.held.find(TICKET, HASHES[index]) == block_id:
            # The rest of the block is read now.
            self.network.append((token, index, seen if self.memory[block_id] == seen else b"torn"))

    def release(self) -> None:
        self.held.withdraw(TICKET)
        self.pins.release(TICKET)

    def take(self) -> None:
        """Another request gets all that is to be had, and writes to it."""
        self.others = [self.pool.allocate() for _ in range(self.pool.num_available)]
        for block_id in self.others:
            self.memory[block_id] = b"other"

    def pull(self) -> None:
        self.num_pulls += 1
        self.num_asked = 0
        read = self.reads.begin(self.num_pulls, HASHES, None, 0)
        assert read is not None
        self.under_way[read.token] = read
        self.pulls.begin(read.token, read.wanted, 0.0)

    def deliver(self, message: tuple[int, int, bytes]) -> None:
        """It stays in the network, for a second time."""
        token, index, content = message
        found = self.pulls.next_block(token, index)
        if found is not None:
            assert content == found[0], "what was sent is not what was asked for"
            self.writing = (token, found[1], content)

    def written(self) -> None:
        assert self.writing is not None
        (token, block_id, content), self.writing = self.writing, None
        self.own_memory[block_id] = content
        self.pulls.written(token, 0.0, is_whole=True)

    def plan(self) -> None:
        for token, num_filled in self.pulls.finished():
            self.reads.end(self.under_way.pop(token), num_filled)

    def take_own(self) -> None:
        self.own_others = [self.own.allocate() for _ in range(self.own.num_available)]
        for block_id in self.own_others:
            self.own_memory[block_id] = b"other"

    # What must hold.

    def check(self) -> None:
        for pool, memory, others in (
            (self.pool, self.memory, self.others),
            (self.own, self.own_memory, self.own_others),
        ):
            assert all(memory[block_id] == b"other" for block_id in others), "another's block was written to"
            for block_hash in HASHES:
                block_id = pool.lookup(block_hash)
                assert block_id is None or memory[block_id] == block_hash, "a block is found that is another"
        assert all(content == HASHES[index] for _, index, content in self.network), "sent, and not held"
        held = dict(self.pins.references)
        self.pool.check_invariants(held | dict.fromkeys(self.others, 1))
        self.own.check_invariants(dict.fromkeys((*self.reads.block_ids, *self.own_others), 1))

    def check_end(self) -> None:
        """Whatever has happened: once the requests and the ticket have ended, nothing is held."""
        if self.writing is not None:
            self.written()
        for token in list(self.under_way):
            self.pulls.end(token, 0.0)
        self.plan()
        self.release()
        self.check()
        assert not self.under_way
        assert self.pool.num_available == NUM_BLOCKS - len(self.others)
        assert self.own.num_available == NUM_BLOCKS - len(self.own_others)

    @property
    def key(self) -> object:
        """What the future depends on."""
        return (
            tuple(self.memory),
            self.reading,
            self.num_asked,
            frozenset(self.network),
            bool(self.pins.tickets),
            tuple(self.own_memory),
            self.writing,
            self.num_pulls,
            tuple((token, read.block_ids) for token, read in self.under_way.items()),
            tuple((token, pull.num_filled, pull.ends) for token, pull in self.pulls._pulls.items()),
            tuple(self.pulls._finished),
            bool(self.others),
            bool(self.own_others),
            tuple(map(self.own.lookup, HASHES)),
        )


def walked(depth: int) -> int:
    """Walks every state that is reached within so many events; returns how many there are."""
    level, seen = [World()], set()
    for _ in range(depth):
        found = []
        for world in level:
            for number, _ in enumerate(world.actions()):
                after = copy.deepcopy(world)
                _, act = list(after.actions())[number]
                act()
                after.check()
                if after.key not in seen:
                    seen.add(after.key)
                    found.append(after)
                    copy.deepcopy(after).check_end()
        level = found
    return len(seen)


def test_no_interleaving_writes_to_others_or_leaves_a_block() -> None:
    assert walked(DEPTH) > 500
