"""The disk of the state directory is full under load: what is killed comes back, and the books stay whole.

`python -m benchmarks.full_disk [--seconds 15] [--json ...]`, as root: it mounts a file system in memory.

Clients ask for short answers all the time. The disk is filled to its last byte; gateway, engine and tokenizer
service are killed one after another, each when the one before is back; the room is given back; and each is
killed once more. A process is back when a request that was sent after its death is answered. At the end every
answer that a client got has to be in the ledger, once and with its tokens, or be counted as missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from sqlalchemy import create_engine, select

from benchmarks.answers import Clients
from benchmarks.engine.report import options
from benchmarks.stack import RunningStack, running_stack, write_result
from gateway.ledger.tables import REQUESTS

DISK_MEBIBYTES = 64
NUM_CLIENTS = 4
NUM_TOKENS = 20
CONFIG = """
[supervisor]
restart_delay_s = 0.2
[engine.simulation]
step_ms = 20.0
"""
# What is killed, by the module that it runs.
KINDS = {"gateway": "gateway", "engine": "engine", "tokenizer": "tokenizer_svc"}
BACK_LIMIT_S = 60.0
LEDGER_LIMIT_S = 20.0
_PAUSE_S = 0.05
_MISSING = "millrace_ledger_missing_entries_total"


@dataclass
class Answers:
    """What the clients got."""

    # Completion tokens by request.
    tokens: dict[str, int] = field(default_factory=dict)
    # When the latest request that was answered had been sent, in monotonic seconds.
    last_sent_s: float = 0.0
    num_failed: int = 0


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of its own. Raises PermissionError where this process may not mount one."""
    with TemporaryDirectory() as name:
        options = f"size={DISK_MEBIBYTES}m,mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, "millrace", name]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            raise PermissionError(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


async def keep_full(disk: Path) -> None:
    """Takes the last byte of the disk, and what others give back, until it is cancelled."""
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while ballast.write(bytes(size)) == size:
                        pass
            await asyncio.sleep(_PAUSE_S)


async def ask_forever(clients: Clients, number: int, answers: Answers) -> None:
    """One short answer after another."""
    while True:
        sent_s = time.monotonic()
        answer = await clients.ask(number, [])
        if answer.error:
            answers.num_failed += 1
            await asyncio.sleep(_PAUSE_S)
            continue
        answers.tokens[answer.request_id] = answer.completion_tokens
        answers.last_sent_s = max(answers.last_sent_s, sent_s)


async def kill(stack: RunningStack, kind: str, answers: Answers) -> float:
    """Kills the process of a kind; seconds until requests are answered again."""
    # run.json is as old as the disk has been full.
    children = psutil.Process(stack.state.pid).children()
    (victim,) = (child for child in children if KINDS[kind] in child.cmdline())
    killed_s = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    while answers.last_sent_s <= killed_s:
        if time.monotonic() > killed_s + BACK_LIMIT_S:
            raise SystemExit(f"{kind} did not come back within {BACK_LIMIT_S:g} s")
        await asyncio.sleep(_PAUSE_S)
    return round(time.monotonic() - killed_s, 2)


async def kill_all(stack: RunningStack, answers: Answers) -> tuple[dict[str, float], int]:
    """Seconds until each was back; and what the gateway that was killed had counted as missing."""
    missing = round(stack.counter("gateway", _MISSING))
    return {kind: await kill(stack, kind, answers) for kind in KINDS}, missing


async def fill_and_kill(stack: RunningStack, disk: Path, seconds: float) -> dict[str, object]:
    """The whole of it, on a stack whose state is on `disk`."""
    answers, clients = Answers(), Clients(stack, NUM_CLIENTS, NUM_TOKENS)
    asking = [asyncio.create_task(ask_forever(clients, each, answers)) for each in range(NUM_CLIENTS)]
    try:
        while len(answers.tokens) < NUM_CLIENTS:
            await asyncio.sleep(_PAUSE_S)
        began_s, filling = time.monotonic(), asyncio.create_task(keep_full(disk))
        await asyncio.sleep(seconds / 10)
        while_full, missing_before = await kill_all(stack, answers)
        await asyncio.sleep(max(0.0, began_s + seconds - time.monotonic()))
        num_answered_full = len(answers.tokens)
        filling.cancel()
        (disk / "ballast").unlink()
        afterwards, missing_while_full = await kill_all(stack, answers)
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await clients.close()
    in_ledger = await wait_for_books(stack, answers)
    return {
        "seconds_full": round(seconds, 1),
        "answers": len(answers.tokens),
        "answers_by_the_end_of_the_full_disk": num_answered_full,
        "failed_requests": answers.num_failed,
        **{f"{kind}_back_while_full_s": each for kind, each in while_full.items()},
        **{f"{kind}_back_afterwards_s": each for kind, each in afterwards.items()},
        "answers_without_a_row": len(answers.tokens.keys() - in_ledger.keys()),
        "answers_with_other_tokens": sum(
            in_ledger[name] != [used] for name, used in answers.tokens.items() if name in in_ledger
        ),
        "counted_as_missing": missing_before + missing_while_full + round(stack.counter("gateway", _MISSING)),
        "rows": sum(map(len, in_ledger.values())),
    }


async def wait_for_books(stack: RunningStack, answers: Answers) -> dict[str, list[int]]:
    """Completion tokens of every row by request, once all answers are there, or after LEDGER_LIMIT_S."""
    engine, ends_s = create_engine(stack.ledger_url), time.monotonic() + LEDGER_LIMIT_S
    while True:
        found: dict[str, list[int]] = {}
        with engine.connect() as connection:
            for name, used in connection.execute(select(REQUESTS.c.request_id, REQUESTS.c.completion_tokens)):
                found.setdefault(name, []).append(used)
        if answers.tokens.keys() <= found.keys() or time.monotonic() > ends_s:
            engine.dispose()
            return found
        await asyncio.sleep(_PAUSE_S)


def run(seconds: float) -> dict[str, object]:
    """The figures, of a stack of its own. Raises PermissionError where no file system can be mounted."""
    with small_disk() as disk, running_stack(CONFIG, "--simulated", parent=disk) as stack:
        return asyncio.run(fill_and_kill(stack, disk, seconds))


def main() -> None:
    """Prints the figures, and writes them as JSON with --json."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="the disk is full for at least so long")
    chosen = parser.parse_args()
    figures = run(chosen.seconds)
    for name, value in figures.items():
        print(f"{name:36} {value}")
    write_result(chosen.json, figures)


if __name__ == "__main__":
    main()
