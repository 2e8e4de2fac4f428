"""A model that was packed once is read by the next start, bit for bit, and nothing else is read."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.config import PackedWeightsConfig
from engine.model import kept_files, kept_weights, packed_command
from engine.model.kept_files import KeptIndex, NotKeptError, PackedFolder, PieceReader, WeightsDamagedError
from engine.model.kept_weights import KeptWeights
from engine.model.loader import receive_in_subprocess, unpickled
from engine.runner.build import build
from engine.runner.runner import ModelRunner
from kernels.native.library import NativeUnavailableError, load_native
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.driver import open_runner
from tests.unit.engine.runner.test_apart import BUNDLED, FAMILIES, tokens_of

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("forked_loader")
Stages = list[str]


class Engine:
    """Starts of one model whose packed weights are kept in one folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.config = PackedWeightsConfig(path=str(folder), min_bytes=0, **config)
        self.folder = folder
        self.num_packed = 0
        pack = receive_in_subprocess

        def counted(*arguments: Any) -> Any:
            self.num_packed += 1
            return pack(*arguments)

        monkeypatch.setattr(kept_weights, "receive_in_subprocess", counted)

    def start(self, checkpoint: Path, stages: Stages | None = None, **options: Any) -> ModelRunner:
        """A runner; what it packed is kept when this returns."""
        kept = KeptWeights(self.config)

        def load(request: Any, library: Any, progress: Callable[[str, float], None]) -> Any:
            def told(stage: str, fraction: float) -> None:
                if stages is not None:
                    stages.append(stage)
                progress(stage, fraction)

            return kept.load(request, library, told)

        runner = open_runner(checkpoint, native="required", build=partial(build, load=load), **options)
        if thread := kept.write_later():
            thread.join()
        return runner

    def files(self) -> list[Path]:
        """What is kept."""
        return sorted(self.folder.glob("*.packed"))


class Usage(NamedTuple):
    """Of a file system, as shutil.disk_usage tells it."""

    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Says how large the disk is and how much of it is free; roomy, whatever it really is."""

    def says(total: int, free: int) -> None:
        monkeypatch.setattr(kept_files, "disk_usage", lambda _: Usage(total, total - free, free))

    says(1 << 40, 1 << 39)
    return says


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """With a folder of its own."""
    return Engine(tmp_path / "packed", monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small one."""
    folder = tmp_path / "model"
    folder.mkdir()
    make_checkpoint(folder, "llama")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same(family: str, tmp_path: Path, engine: Engine) -> None:
    make_checkpoint(tmp_path, family, **FAMILIES[family])
    first, second = (tokens_of(engine.start(tmp_path), 199) for _ in range(2))
    assert engine.num_packed == 1
    assert first == second


@pytest.mark.parametrize("quantize", ["off", "w8a8", "int8", "int4"])
def test_every_form_is_the_same(quantize: str, engine: Engine) -> None:
    """Calibrated smoothing, scales and minimums of groups, 12 bits of bfloat16."""
    options: dict[str, Any] = {"dtype": "bfloat16", "quantize": quantize}
    first, second = (tokens_of(engine.start(BUNDLED, **options), 2048) for _ in range(2))
    assert engine.num_packed == 1
    assert first == second


def test_what_was_asked_for_otherwise_is_packed_anew(checkpoint: Path, engine: Engine) -> None:
    for options in ({}, {"quantize": "int8"}, {"dtype": "bfloat16"}, {"max_model_len": 64}):
        engine.start(checkpoint, **options).close()
    assert engine.num_packed == 4
    assert len(engine.files()) == 4


def test_a_copy_is_found_and_maps_its_own_table(tmp_path: Path, engine: Engine) -> None:
    make_checkpoint(tmp_path / "model", "llama", vocab_size=70_000, hidden_size=64)
    first = tokens_of(engine.start(tmp_path / "model"), 70_000)
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    shutil.rmtree(tmp_path / "model")
    runner = engine.start(tmp_path / "copy")
    assert str(tmp_path / "copy") in Path("/proc/self/maps").read_text()
    assert tokens_of(runner, 70_000) == first
    assert engine.num_packed == 1
    # Its dates are known now, so no byte of it is read to know it.
    stages: Stages = []
    engine.start(tmp_path / "copy", stages).close()
    assert not [each for each in stages if "compare" in each]


def test_a_checkpoint_that_was_written_to_is_packed_anew(checkpoint: Path, engine: Engine) -> None:
    engine.start(checkpoint).close()
    file = checkpoint / "model.safetensors"
    dates = file.stat()
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x10
    file.write_bytes(data)
    # Whoever puts the date back does not put back when it was changed.
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    changed = tokens_of(engine.start(checkpoint), 199)
    assert engine.num_packed == 2
    assert changed == tokens_of(open_runner(checkpoint, native="required"), 199)


def test_a_damaged_file_is_dropped_and_packed_again(
    checkpoint: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    first = tokens_of(engine.start(checkpoint), 199)
    (file,) = engine.files()
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    stages: Stages = []
    with caplog.at_level(logging.WARNING):
        again = tokens_of(engine.start(checkpoint, stages), 199)
    assert again == first
    assert engine.num_packed == 2
    assert "drop damaged packed weights" in stages
    assert "is damaged, dropped and packed again" in caplog.text
    engine.start(checkpoint).close()
    assert engine.num_packed == 2


@pytest.mark.parametrize("place", [0.3, -40, -12, "cut", "empty"])
def test_damage_is_found_wherever_it_is(place: float | str, tmp_path: Path) -> None:
    with PackedFolder(tmp_path, 1 << 20).written("a.packed", 1000) as target:
        piece = target.add(bytes(range(250)) * 4)
        target.finish(
            KeptIndex(fingerprint="f", model="m", files=(), mapped={}, weights=(), arrays=(), pickled=piece)
        )
    path = tmp_path / "a.packed"
    whole = path.read_bytes()

    def read() -> bytes:
        reader, room = PieceReader(path), bytearray(1000)
        try:
            reader.read(reader.index.pickled, memoryview(room))
        finally:
            reader.close()
        return bytes(room)

    assert read() == bytes(range(250)) * 4
    data = bytearray(whole[: {"cut": len(whole) // 2, "empty": 0}.get(str(place), len(whole))])
    if not isinstance(place, str):
        data[int(place * len(data)) if place > 0 else int(place)] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsDamagedError):
        read()


def test_a_file_that_others_may_write_to_is_not_read(checkpoint: Path, engine: Engine) -> None:
    engine.start(checkpoint).close()
    (file,) = engine.files()
    file.chmod(0o666)
    engine.start(checkpoint).close()
    assert engine.num_packed == 2


def test_two_that_start_at_once_keep_one(checkpoint: Path, engine: Engine) -> None:
    threads = [threading.Thread(target=lambda: engine.start(checkpoint).close()) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (file,) = engine.files()
    PieceReader(file).close()
    assert {path.name for path in engine.folder.iterdir()} == {file.name, "lock"}


def test_what_was_not_used_for_longest_makes_room(checkpoint: Path, engine: Engine) -> None:
    forms: list[dict[str, Any]] = [{"max_model_len": length} for length in (64, 62, 60)]
    for form in forms[:2]:
        engine.start(checkpoint, **form).close()
    total = sum(path.stat().st_size for path in engine.files())
    engine.config = PackedWeightsConfig(path=str(engine.folder), min_bytes=0, max_bytes=total)
    for age, path in enumerate(sorted(engine.files(), key=lambda each: each.stat().st_mtime_ns)):
        os.utime(path, (age, age))
    engine.start(checkpoint, **forms[0]).close()
    engine.start(checkpoint, **forms[2]).close()
    assert engine.num_packed == 3
    engine.start(checkpoint, **forms[0]).close()
    assert engine.num_packed == 3, "it was used after the other"
    engine.start(checkpoint, **forms[1]).close()
    assert engine.num_packed == 4


def test_what_does_not_fit_is_told_and_served(
    checkpoint: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.config = PackedWeightsConfig(path=str(engine.folder), min_bytes=0, max_bytes=1000)
    with caplog.at_level(logging.INFO):
        engine.start(checkpoint).close()
    assert "engine.packed_weights.max_bytes is 1000; raise it" in caplog.text
    assert not engine.files()


@pytest.mark.parametrize(
    ("total", "free", "is_kept"),
    [
        (1 << 40, 3 << 30, True),
        (1 << 40, 2 << 30, False),
        (10 << 30, 1 << 30, True),
        (10 << 30, 500 << 20, False),
    ],
)
def test_a_part_of_a_disk_is_left_free(
    total: int,
    free: int,
    is_kept: bool,
    disk: Callable[[int, int], None],
    checkpoint: Path,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A twentieth, and of a large disk 2 GiB: what is free beside that is for packed weights."""
    disk(total, free)
    with caplog.at_level(logging.INFO):
        engine.start(checkpoint).close()
    assert len(engine.files()) == is_kept
    assert ("that are left free; make room there" in caplog.text) != is_kept


def test_a_folder_that_cannot_be_written_is_told_and_served(
    checkpoint: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.folder.write_text("a file lies there")
    with caplog.at_level(logging.WARNING):
        runner = engine.start(checkpoint)
    assert "are not kept" in caplog.text
    assert tokens_of(runner, 199) == tokens_of(open_runner(checkpoint, native="required"), 199)


def test_a_user_without_a_directory_is_told_and_served(
    checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody(*_: object) -> Path:
        raise ConfigError("nobody says what the user's directory is")

    monkeypatch.setattr(kept_weights, "cache_folder", nobody)
    engine.config = PackedWeightsConfig(min_bytes=0)
    with caplog.at_level(logging.WARNING):
        engine.start(checkpoint).close()
    assert "no packed weights are kept, as engine.packed_weights.path is empty" in caplog.text


def test_small_models_and_none_at_all(checkpoint: Path, engine: Engine) -> None:
    for config in (PackedWeightsConfig(path=str(engine.folder)), PackedWeightsConfig(max_bytes=0)):
        engine.config = config
        engine.start(checkpoint).close()
    assert not engine.files()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    files = PackedFolder(tmp_path, 1 << 20)
    left = tmp_path / ".writing-0123-x.packed"
    left.write_bytes(b"half")
    with files.written("a.packed", 10) as outer:
        outer.add(b"x")
        assert not left.exists()
        unfinished = next(tmp_path.glob(".writing-*"))
        with pytest.raises(NotKeptError), files.written("b.packed", 2 << 20):
            pass
        assert unfinished.exists(), "who writes it lives"
        with pytest.raises(NotKeptError, match="on purpose"), files.written("c.packed", 10):
            raise NotKeptError("on purpose")
    assert {path.name for path in tmp_path.iterdir()} == {"a.packed", "lock"}


def test_the_command_lists_and_clears(
    checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.start(checkpoint, quantize="int8").close()
    (file,) = engine.files()
    (engine.folder / "broken.packed").write_bytes(b"nothing")
    monkeypatch.setenv("MILLRACE_ENGINE__PACKED_WEIGHTS__PATH", str(engine.folder))

    def said(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["packed", "--json", *arguments])
        assert packed_command.main() == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    models = {each["file"]: each for each in said()["models"]}
    assert f"{checkpoint}, int8" in models[file.name]["model"]
    assert models[file.name]["bytes"] == file.stat().st_size
    assert "damaged" in models["broken.packed"]
    assert said("--clear")["cleared"]
    assert said()["models"] == []
    assert not engine.files()


class Hostile:
    """Names a function where a record is expected."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_nothing_but_records_is_made_of_a_file() -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no part of a record"):
        unpickled(pickle.dumps(Hostile()), (), (), place=lambda part: part)


def test_weights_are_settled_once_nobody_writes_them_any_more(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, write = threading.Event(), KeptWeights._write

    def slowly(*given: Any) -> None:
        assert may_end.wait(60)
        write(*given)

    monkeypatch.setattr(KeptWeights, "_write", slowly)
    for is_packed in (True, False):
        kept = KeptWeights(PackedWeightsConfig(path=str(tmp_path / "packed"), min_bytes=0))
        with closing(open_runner(checkpoint, native="required", build=partial(build, load=kept.load))):
            assert not kept.is_settled
            thread = kept.write_later()
            assert (thread is not None) == is_packed
            if thread is not None:
                assert not kept.is_settled
                assert kept.write_later() is None
                assert not kept.is_settled
                may_end.set()
                thread.join()
            assert kept.is_settled
