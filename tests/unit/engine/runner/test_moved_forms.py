"""Blocks of every form of keys and values leave one engine, by disk or to a peer, and are the same bytes in
another, whose answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.runner.prefix_disk.entries import EntryFiles
from engine.runner.prefix_disk.tier import DiskTier
from engine.runner.prefix_peers import staging
from engine.runner.runner import ModelRunner
from engine.types.hand_over import Pull, ReadHeld, SentBlocks
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.engine.runner.test_prefix_disk import PRINT, eventually
from tests.unit.engine.runner.test_prefix_peers import FORM, SOURCE, TICKET, Side, pulled

FORMS: dict[str, dict[str, Any]] = {
    "int8": {"kv_dtype": "int8"},
    "fp8": {"kv_dtype": "fp8"},
    "each": {"kv_dtype": "int8", "kv_dtype_layers": {"1": "fp8", "2": "auto"}},
}
# Whose whole blocks are longer.
BY_CHANNEL = {"kv_dtype": "kivi4", "block_size": 64}
PROMPT = prompt_of(75, 199)
HASHES = tuple(bytes([each]) * 16 for each in range(1, 5))
# The prompt's whole blocks in one cache, and in the other.
THERE, HERE = [3, 0, 6, 2], [9, 4, 1, 7]
# Numpy knows no bfloat16.
BYTES = {np.ndarray: np.uint8, torch.Tensor: torch.uint8}
Move = Callable[[ModelRunner, ModelRunner], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    make_checkpoint(place, "llama", head_dim=16, num_hidden_layers=4)
    return place


@pytest.fixture(params=["disk", "peer", "peer of the same machine"])
def move(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Move]:
    """What takes the blocks THERE of one cache to HERE in another."""
    monkeypatch.setattr(staging, "FOLDER", tmp_path)
    if request.param == "disk":
        yield lambda there, here: by_disk(tmp_path, there, here)
    else:
        yield lambda there, here: by_peers(there, here, shared=request.param != "peer")


def by_disk(root: Path, there: ModelRunner, here: ModelRunner) -> None:
    num_bytes = there.storage.block_bytes().num_bytes
    files = EntryFiles(root, PRINT, entry_bytes=num_bytes, max_bytes=1 << 30)
    with closing(DiskTier(files, there.storage.block_bytes)) as tier:
        for block_id, block_hash in zip(THERE, HASHES, strict=True):
            tier.write_later(block_id, block_hash)
    with closing(DiskTier(files, here.storage.block_bytes)) as tier:
        tier.read_later(1, list(zip(HASHES, HERE, strict=True)))
        found: list[tuple[int, int]] = []
        eventually(lambda: bool(found.extend(tier.finished()) or found))
    assert found == [(1, len(HERE))]


def by_peers(there: ModelRunner, here: ModelRunner, *, shared: bool) -> None:
    with (
        closing(Side("prefill", blocks=there.storage.block_bytes)) as sender,
        closing(Side("decode", blocks=here.storage.block_bytes)) as receiver,
    ):
        sender.tier.offer(TICKET, list(zip(HASHES, THERE, strict=True)))
        receiver.tier.pull_later(7, list(zip(HASHES, HERE, strict=True)), SOURCE, 1.0)
        asked = receiver.hear()
        assert isinstance(asked, Pull)
        sender.say(ReadHeld(1, TICKET, FORM, 0, HASHES, asked.staging if shared else ""))
        sent: list[Any] = []
        while len(sent) < len(HASHES):
            message = sender.hear()
            assert isinstance(message, SentBlocks)
            sent += message.blocks
        assert [data == b"" for _, data in sent] == [shared] * len(sent)
        receiver.say(pulled(0, *sent))
        receiver.settle()
        assert receiver.tier.finished() == [(7, len(HERE))]


def answered(runner: ModelRunner, blocks: list[int], num_computed: int) -> list[int]:
    """The answer to PROMPT, whose whole blocks are these, and how much of it is computed already."""
    driver = Driver(runner)
    driver._free = [each for each in driver._free if each not in blocks]
    (job,) = driver.run([Job(PROMPT, num_tokens=12)], prefix=(blocks, num_computed))
    return job.output


def bytes_of(runner: ModelRunner, blocks: list[int]) -> list[bytes]:
    """Of each part of each layer."""
    parts = [part for layer in runner.storage.layers for part in layer.tensors()]
    return [np.asarray(part.view(BYTES[type(part)]))[blocks].tobytes() for part in parts]


@pytest.mark.parametrize(
    ("form", "native"),
    [(form, native) for form in (*FORMS.values(), BY_CHANNEL) for native in ("required", "off")],
)
def test_blocks_are_the_same_elsewhere_and_so_is_the_answer(
    folder: Path, move: Move, form: dict[str, Any], native: str
) -> None:
    options: dict[str, Any] = {"cache": form, "native": native, "kv_cache_bytes": 1 << 20}
    with closing(open_runner(folder, **options)) as there, closing(open_runner(folder, **options)) as here:
        expected = answered(there, THERE, 0)
        move(there, here)
        assert bytes_of(here, HERE) == bytes_of(there, THERE)
        assert answered(here, HERE, 64) == expected
