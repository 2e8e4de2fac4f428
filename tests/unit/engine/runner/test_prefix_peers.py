"""The tier of other engines: what comes is written where it belongs, or dropped and counted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from contract.frames import framed, read_frame
from engine.config import HandOverConfig
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.runner.prefix_peers import staging
from engine.runner.prefix_peers.staging import BlockStaging, StagedBlocks, remove_leftovers
from engine.runner.prefix_peers.tier import PeerTier
from engine.types.hand_over import (
    BlockSource,
    Checked,
    FromCore,
    NotHeld,
    Pull,
    PulledBlocks,
    PullEnded,
    ReadEnded,
    ReadHeld,
    SentBlocks,
    StopPull,
    ToCore,
)

FORM, TICKET = b"f" * 16, b"t" * 16
HASHES = tuple(bytes([each]) * 16 for each in range(1, 4))
SOURCE = BlockSource("elsewhere:1", TICKET)


class Side:
    """One engine's tier over blocks [N, 8] of its own, or those of another cache, and the front's end of its
    socket.
    """

    def __init__(self, role: str, form: bytes = FORM, blocks: Callable[[], BlockBytes] | None = None) -> None:
        self.blocks = np.zeros((6, 8), np.uint8)
        self.front, core = socket.socketpair()
        self.front.settimeout(10)
        of = blocks or (lambda: BlockBytes([self.blocks]))
        self.tier = PeerTier(core, of, form, HandOverConfig(), role=role)
        self._stream = self.front.makefile("rb")
        # Of its pull.
        self.staging = ""

    def say(self, message: ToCore) -> None:
        self.front.sendall(framed(msgspec.msgpack.encode(message)))

    def hear(self) -> FromCore:
        frame = read_frame(self._stream)
        assert frame is not None
        return msgspec.msgpack.decode(frame, type=FromCore)

    def settle(self) -> None:
        """What was said before is done."""
        self.say(ReadHeld(0, b"", b"another form", 0, HASHES[:1]))
        assert self.hear() == NotHeld(0, "form")

    def close(self) -> None:
        self.tier.close()
        self._stream.close()
        self.front.close()


@pytest.fixture
def sender() -> Iterator[Side]:
    side = Side("prefill")
    side.blocks[:] = np.arange(48).reshape(6, 8)
    side.tier.offer(TICKET, list(zip(HASHES, (4, 2, 3), strict=True)))
    yield side
    side.close()


@pytest.fixture
def receiver() -> Iterator[Side]:
    side = Side("decode")
    side.tier.pull_later(7, list(zip(HASHES, (1, 0, 5), strict=True)), SOURCE, 1.0)
    asked = side.hear()
    assert isinstance(asked, Pull)
    assert (asked.token, asked.source, asked.hashes, asked.limit_s) == (7, SOURCE, HASHES, 3.0)
    side.staging = asked.staging
    yield side
    side.close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of memory in common."""
    monkeypatch.setattr(staging, "FOLDER", tmp_path)
    return tmp_path


def held(sender: Side, shared: str = "") -> tuple[Checked, ...]:
    sender.say(ReadHeld(1, TICKET, FORM, 0, HASHES, shared))
    found = sender.hear()
    assert isinstance(found, SentBlocks)
    return found.blocks


def pulled(index: int, *blocks: Checked, token: int = 7) -> PulledBlocks:
    return PulledBlocks(token, index, blocks)


def test_blocks_arrive_as_they_were(sender: Side, receiver: Side) -> None:
    first, *others = held(sender)
    receiver.say(pulled(0, first))
    receiver.say(pulled(1, *others))
    receiver.settle()
    assert receiver.tier.finished() == [(7, 3)]
    assert receiver.blocks[[1, 0, 5]].tolist() == sender.blocks[[4, 2, 3]].tolist()
    assert not receiver.blocks[2:5].any()
    counters = receiver.tier.counters()
    assert (counters.num_received, counters.received_bytes, counters.num_pulls) == (3, 24, 1)
    assert (sender.tier.counters().num_sent, sender.tier.counters().num_held_blocks) == (3, 3)


def test_engines_of_one_machine_share_memory(sender: Side, receiver: Side, folder: Path) -> None:
    blocks = held(sender, receiver.staging)
    assert [data for _, data in blocks] == [b""] * 3
    assert sum(1 for _ in folder.iterdir()) == 1
    receiver.say(pulled(0, *blocks))
    receiver.settle()
    assert receiver.blocks[[1, 0, 5]].tolist() == sender.blocks[[4, 2, 3]].tolist()
    # Nothing would be left behind, whoever is killed now.
    assert not list(folder.iterdir())
    assert receiver.tier.finished() == [(7, 3)]
    sender.say(ReadEnded(1))
    sender.settle()
    assert not sender.tier._staged
    assert not receiver.tier._stagings


def test_what_has_no_free_slot_comes_in_a_message(
    sender: Side, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MOST_BYTES", 2 * 8)
    receiver = Side("decode")
    receiver.tier.pull_later(7, list(zip(HASHES, (1, 0, 5), strict=True)), SOURCE, 1.0)
    asked = receiver.hear()
    assert isinstance(asked, Pull)
    blocks = held(sender, asked.staging)
    assert [len(data) for _, data in blocks] == [0, 0, 8]
    receiver.say(pulled(0, *blocks))
    receiver.settle()
    assert receiver.blocks[[1, 0, 5]].tolist() == sender.blocks[[4, 2, 3]].tolist()
    receiver.close()


def test_slots_are_used_again_once_they_were_taken() -> None:
    ours = BlockStaging.make(3, 8)
    assert ours is not None
    theirs = StagedBlocks.open(ours.name, 8)
    assert theirs is not None
    for index in range(20):
        assert theirs.put(index, bytes([index]) * 8)
        if index % 5 == 4:
            ours.skip(index)
        else:
            assert ours.take(index) == bytes([index]) * 8
    assert [theirs.put(20 + k, b"x" * 8) for k in range(4)] == [True, True, True, False]
    theirs.close()
    ours.close()


def test_memory_of_others_is_not_touched(folder: Path) -> None:
    (folder / "passwords").write_bytes(bytes(8192))
    ours = BlockStaging.make(3, 8)
    assert ours is not None
    (folder / f"millrace-blocks-{'0' * 32}").symlink_to(folder / ours.name)
    for name in ("", "passwords", "../passwords", f"millrace-blocks-{'0' * 32}", f"{ours.name}/"):
        assert StagedBlocks.open(name, 8) is None
    # Of another size of blocks.
    assert StagedBlocks.open(ours.name, 7) is None
    # What an engine left that was killed goes, and what is in use stays.
    left = folder / f"millrace-blocks-{'1' * 32}"
    left.write_bytes(b"")
    remove_leftovers()
    assert not left.exists()
    assert (folder / ours.name).exists()
    ours.close()
    assert not (folder / ours.name).exists()


def test_without_memory_in_common_blocks_come_in_messages(
    sender: Side, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "FOLDER", folder / "absent")
    assert BlockStaging.make(3, 8) is None
    assert [len(data) for _, data in held(sender, f"millrace-blocks-{'0' * 32}")] == [8, 8, 8]


def test_damaged_bytes_end_the_pull_before_them(sender: Side, receiver: Side) -> None:
    first, second, third = held(sender)
    receiver.say(pulled(0, first))
    receiver.say(pulled(1, (second[0], second[1][::-1]), third))
    assert receiver.hear() == StopPull(7)
    receiver.say(PullEnded(7, "lost"))
    receiver.settle()
    assert receiver.tier.finished() == [(7, 1)]
    counters = receiver.tier.counters()
    assert counters.num_late == 1
    assert {reason: number for reason, number in counters.failures.items() if number} == {"checksum": 1}
    assert not receiver.blocks[[0, 2, 3, 4, 5]].any()


def test_what_comes_twice_or_late_touches_nothing(sender: Side, receiver: Side) -> None:
    first, second, _ = held(sender)
    receiver.say(pulled(1, second))
    receiver.say(pulled(0, first))
    receiver.say(pulled(0, first))
    receiver.settle()
    receiver.tier.stop(7)
    assert receiver.hear() == StopPull(7)
    assert receiver.tier.finished() == [(7, 1)]
    # Its blocks are somebody else's now.
    receiver.blocks[:] = 99
    receiver.say(pulled(1, second))
    receiver.say(pulled(0, first, token=8))
    receiver.settle()
    assert (receiver.blocks == 99).all()
    assert receiver.tier.counters().num_late == 4
    receiver.tier.stop(7)
    assert receiver.tier.finished() == []


def test_what_was_let_go_or_is_of_another_form_is_not_sent(sender: Side) -> None:
    sender.say(ReadHeld(2, TICKET, b"g" * 16, 0, HASHES))
    assert sender.hear() == NotHeld(2, "form")
    sender.say(ReadHeld(3, TICKET, FORM, 0, (HASHES[0], b"unknown" * 2)))
    assert isinstance(sender.hear(), SentBlocks)
    assert sender.hear() == NotHeld(3, "gone")
    sender.tier.withdraw(TICKET)
    sender.say(ReadHeld(4, TICKET, FORM, 0, HASHES))
    assert sender.hear() == NotHeld(4, "gone")
    assert sender.tier.counters().num_sent == 1
