"""A prefix cache that outlives the engine: real engines, one after another and side by side."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from checkpoint.vocabulary import checkpoint_fingerprint
from observability.emit import names
from tests.unit.engine.service.engine_client import ROOT, Engine, Gateway, signed, start_engine, tokens

BASE = "models/millrace-nano"
PROMPT = [100 + (7 * each) % 190 for each in range(200)]
# All full blocks but the one that the last token may be in.
NUM_CACHED = 192
pytestmark = pytest.mark.asyncio(loop_scope="module")
EACH_FORM = {
    "cache__kv_dtype": "kivi4",
    "cache__kv_dtype_layers": '{"0" = "int8", "1" = "fp8", "2" = "auto"}',
    "cache__block_size": "64",
}


def settings(folder: Path, **more: str) -> dict[str, str]:
    return {"simulated": "false", "cache__disk_path": str(folder), "metrics_listen": "127.0.0.1:0", **more}


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def ask(engine: Engine, handle: int = 1, salt: bytes = b"acme") -> tuple[list[int], int]:
    """Tokens of the answer, and how many of the prompt were not computed."""
    gateway = Gateway(engine, checkpoint_fingerprint(BASE))
    await gateway.hello()
    await gateway.submit(
        handle, PROMPT, context=signed(cache_salt=salt), max_tokens=24, temperature=0.0, ignore_eos=True
    )
    outputs = (await gateway.until_ended(1))[handle, 0]
    gateway.call.cancel()
    first = next(each.first_token for each in outputs if each.HasField("first_token"))
    return tokens(outputs), first.cached_prompt_tokens


def counted(engine: Engine, event: str) -> float:
    """Blocks of the disk, by what became of them, as the engine reports."""
    with urlopen(f"http://{engine.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    wanted = f'{names.DISK_BLOCKS.name}{{event="{event}"}}'
    return next(float(line.split()[-1]) for line in lines if line.startswith(wanted))


async def until(engine: Engine, event: str, number: float) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(counted, engine, event) < number:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("form", [{}, EACH_FORM], ids=["auto", "each form"])
async def test_an_engine_that_starts_again_finds_the_prefix(tmp_path: Path, form: dict[str, str]) -> None:
    asked = settings(tmp_path, **form)
    async with start_engine(BASE, **asked) as engine:
        expected, cached = await ask(engine)
        assert cached == 0
    async with start_engine(BASE, **asked) as engine:
        assert await ask(engine) == (expected, NUM_CACHED)
        await until(engine, "read", NUM_CACHED / int(form.get("cache__block_size", "16")))
        # Another tenant's salt finds nothing, and gets the same answer.
        assert await ask(engine, salt=b"umbrella") == (expected, 0)
        books = await engine.wait_until_idle()
        assert books.ok, books.violation
        assert books.num_unreferenced_blocks == books.num_total_blocks


async def test_engines_of_one_machine_share_what_they_compute(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    folder = tmp_path / "disk"
    asked = settings(folder, cache__disk_key_file=str(key))
    async with start_engine(BASE, **asked) as first, start_engine(BASE, **asked) as second:
        expected, _ = await ask(first)
        await until(first, "written", NUM_CACHED / 16)
        # It looks for what others have written now and then.
        async with asyncio.timeout(60):
            salted, pause_s = b"acme", 0.1
            while (found := await ask(second, salt=salted))[1] == 0:
                # What it has computed itself is no proof.
                salted, pause_s = salted + b"+", 2 * pause_s
                await ask(first, salt=salted)
                await asyncio.sleep(pause_s)
        assert found == (expected, NUM_CACHED)
    (entry, *_) = entries(folder)
    assert entry.read_bytes().startswith(b"mrkv-s1\n")
    # Without the key nothing of it is found, nor touched.
    async with start_engine(BASE, **settings(folder)) as plain:
        assert await ask(plain) == (expected, 0)
        assert counted(plain, "damaged") == 0
    assert entry.exists()


async def test_damaged_entries_are_dropped_counted_and_recomputed(tmp_path: Path) -> None:
    async with start_engine(BASE, **settings(tmp_path)) as engine:
        expected, _ = await ask(engine)
    for path in entries(tmp_path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x40
        path.write_bytes(content)
    async with start_engine(BASE, **settings(tmp_path)) as engine:
        assert await ask(engine) == (expected, 0)
        await until(engine, "damaged", 1)
    async with start_engine(BASE, **settings(tmp_path)) as engine:
        # What was recomputed took its place.
        tokens_again, cached = await ask(engine)
        assert tokens_again == expected
        assert cached > 0


async def test_a_core_killed_while_it_writes_spoils_nothing(tmp_path: Path) -> None:
    async with start_engine(BASE, **settings(tmp_path)) as engine:
        expected, _ = await ask(engine)
        await until(engine, "written", 1)
        await ask(engine, salt=b"other")
        os.kill(engine.core_pid, signal.SIGKILL)
        await asyncio.wait_for(engine.process.wait(), 30)
    async with start_engine(BASE, **settings(tmp_path)) as engine:
        found, cached = await ask(engine)
        assert found == expected
        assert cached > 0
        assert counted(engine, "damaged") == 0


async def test_a_disk_that_takes_nothing_costs_nobody_an_answer(tmp_path: Path) -> None:
    async with start_engine(BASE, **settings(tmp_path)) as engine:
        # Files of this process end after so many bytes, as on a full disk.
        resource.prlimit(engine.core_pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        expected, _ = await ask(engine)
        await until(engine, "failed", 1)
        assert len(expected) == 24
        assert await ask(engine) == (expected, NUM_CACHED)
        assert counted(engine, "written") == 0
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cache__disk_path": "relative"}, "engine.cache.disk_path"),
        ({"cache__disk_path": "/proc/none"}, "engine.cache.disk_path"),
        ({"cache__disk_bytes": "100"}, "engine.cache.disk_bytes"),
        ({"cache__disk_key_file": "/none"}, "engine.cache.disk_key_file"),
        ({"cache__prefix_caching": "false"}, "engine.cache.disk_path"),
        ({"simulated": "true"}, "engine.cache.disk_path"),
        ({"make": "vllm"}, "engine.cache.disk_path"),
    ],
)
async def test_what_cannot_work_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, str], field: str
) -> None:
    given = {**settings(tmp_path), "listen": "127.0.0.1:0", **changes}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")}
    environment |= {f"MILLRACE_ENGINE__{key.upper()}": value for key, value in given.items()}
    environment |= {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'contract/stubs'}",
        "MILLRACE_MODEL__PATH": BASE,
        "MILLRACE_SECURITY__CONTEXT_SECRET": "s" * 32,
    }
    command = [sys.executable, "-m", "engine"]
    ended = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert field in ended.stderr.splitlines()[-1]
