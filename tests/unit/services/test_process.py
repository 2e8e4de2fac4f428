"""One child process: ready line, failure, end of its group, death together with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.supervisor import process as process_module
from services.supervisor.process import ChildProcess, ProcessEnded, ProcessSpec, describe_code

LIMIT_S = 30.0


def child(tmp_path: Path, program: str, **spec: Any) -> ChildProcess:
    argv = (sys.executable, "-c", textwrap.dedent(program))
    return ChildProcess(ProcessSpec(name="part", argv=argv, **spec), tmp_path / "part.log", {"PART": "1"})


async def test_ready_line_gives_the_addresses(tmp_path: Path) -> None:
    part = child(
        tmp_path,
        """
        import os, sys, time
        print("noise", flush=True)
        print("a complaint", file=sys.stderr, flush=True)
        print(f"ready part grpc=127.0.0.1:1 http=127.0.0.1:{os.environ['PART']}", flush=True)
        time.sleep(600)
        """,
    )
    await part.start()
    try:
        addresses = await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
        assert addresses == {"grpc": "127.0.0.1:1", "http": "127.0.0.1:1"}
        assert part.running
        # Not lines: an interpreter that is told to buffer nothing writes their ends separately.
        assert "noise" in part.log_tail()
        assert "a complaint" in part.log_tail()
    finally:
        part.kill()
    assert await part.wait() == -signal.SIGKILL


async def test_end_before_ready_is_told_with_its_status(tmp_path: Path) -> None:
    part = child(tmp_path, "import sys; print('why it failed', file=sys.stderr); sys.exit(3)")
    await part.start()
    with pytest.raises(ProcessEnded, match="part ended with exit status 3") as raised:
        await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    assert raised.value.code == 3
    assert part.log_tail() == "why it failed"


async def test_stop_lets_a_process_finish(tmp_path: Path) -> None:
    part = child(
        tmp_path,
        """
        import signal, sys, time
        def finish(*_):
            print("finished", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, finish)
        print("ready part", flush=True)
        time.sleep(600)
        """,
    )
    await part.start()
    await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    await part.stop()
    assert await part.wait() == 0
    assert "finished" in part.log_tail()


async def test_stop_kills_what_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "KILL_MARGIN_S", 0.1)
    part = child(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready part", flush=True)
        time.sleep(600)
        """,
        drain_limit_s=0.1,
    )
    await part.start()
    await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    await part.stop()
    assert await part.wait() == -signal.SIGKILL


async def test_grandchildren_end_with_the_group(tmp_path: Path) -> None:
    part = child(
        tmp_path,
        """
        import subprocess, sys, time
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"ready part inner={inner.pid}", flush=True)
        time.sleep(600)
        """,
        drain_limit_s=5.0,
    )
    await part.start()
    inner = psutil.Process(int((await asyncio.wait_for(part.wait_ready_line(), LIMIT_S))["inner"]))
    await part.stop()
    await asyncio.to_thread(_wait_gone, inner)


def test_the_loop_hears_of_what_was_killed_before_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else asyncio tells the user of it, below the line that says why nothing was started."""
    # Its memory takes the kernel a moment to clear.
    program = "import time; held = b'x' * (256 << 20); print('ready part', flush=True); time.sleep(600)"
    part = child(tmp_path, program)

    async def main() -> None:
        await part.start()
        await part.wait_ready_line()
        part.kill()
        await part.wait_killed()
        assert not part.running

    asyncio.run(main())
    for thread in threading.enumerate():
        # asyncio's own thread, which waits for the process and wakes the loop.
        if thread.name.startswith("asyncio-waitpid"):
            thread.join(LIMIT_S)
    assert not caplog.records


async def test_can_be_started_again(tmp_path: Path) -> None:
    part = child(tmp_path, "print('ready part', flush=True)")
    for _ in range(2):
        await part.start()
        await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
        assert await part.wait() == 0
    assert part.log_tail().splitlines() == ["ready part"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help exists on Linux only")
def test_child_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
        import asyncio, sys
        from pathlib import Path
        from services.supervisor.process import ChildProcess, ProcessSpec
        async def main():
            argv = (sys.executable, "-c", "print('ready part', flush=True); import time; time.sleep(600)")
            part = ChildProcess(ProcessSpec(name="part", argv=argv), Path({str(tmp_path / "log")!r}), {{}})
            await part.start()
            await part.wait_ready_line()
            print(part.pid, flush=True)
            await part.wait()
        asyncio.run(main())
    """
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert supervisor.stdout is not None
        orphan = psutil.Process(int(supervisor.stdout.readline()))
        os.kill(supervisor.pid, signal.SIGKILL)
        _wait_gone(orphan)
    finally:
        supervisor.kill()
        supervisor.wait()


def test_a_fork_beside_threads_of_grpc_only_starts_the_child() -> None:
    program = """
        import os, subprocess
        from concurrent.futures import ThreadPoolExecutor
        import services.cli, grpc
        server = grpc.server(ThreadPoolExecutor(1))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result()
            for _ in range(10):
                subprocess.run(["true"], check=True, preexec_fn=lambda: None)
            os._exit(0)
    """
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # gRPC tells about its handlers for forks, and they abort a child now and then.
    assert ran.stderr == ""


def test_statuses_in_words() -> None:
    assert describe_code(2) == "exit status 2"
    assert describe_code(-9) == "signal SIGKILL"


def _wait_gone(process: psutil.Process) -> None:
    # It may end between the two questions.
    with suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own")
@pytest.mark.parametrize("is_batch", [False, True])
async def test_scheduling_is_that_of_all_threads_and_children(tmp_path: Path, is_batch: bool) -> None:
    part = child(
        tmp_path,
        """
        import os, subprocess, sys, threading
        found = []
        thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
        ask = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
        below = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
        print(f"ready part thread={found[0]} child={below}", flush=True)
        """,
        is_batch=is_batch,
    )
    await part.start()
    expected = str(os.SCHED_BATCH if is_batch else os.SCHED_OTHER)
    told = await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    assert told == {"thread": expected, "child": expected}
    await part.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own")
async def test_a_process_gives_way_with_all_that_it_starts(tmp_path: Path) -> None:
    part = child(
        tmp_path,
        """
        import os, subprocess, sys, time
        from pathlib import Path
        group = Path("/proc/self/autogroup")
        while group.exists() and group.read_text().split()[-1] == "0":
            time.sleep(0.01)
        ask = [sys.executable, "-c", "import os; print(os.nice(0))"]
        below = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
        shared = group.read_text().split()[-1] if group.exists() else os.nice(0)
        print(f"ready part own={os.nice(0)} child={below} session={shared}", flush=True)
        """,
        niceness=7,
    )
    before = os.nice(0)
    await part.start()
    told = await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    expected = str(min(19, before + 7))
    assert told == {"own": expected, "child": expected, "session": "7"}
    assert os.nice(0) == before
    await part.wait()


async def test_a_full_disk_keeps_nobody_from_starting() -> None:
    """More output than a pipe holds, for a log that takes none."""
    program = "print('x' * 300_000); print('ready part', flush=True); import time; time.sleep(600)"
    part = ChildProcess(ProcessSpec(name="part", argv=(sys.executable, "-c", program)), Path("/dev/full"), {})
    await part.start()
    try:
        assert await asyncio.wait_for(part.wait_ready_line(), LIMIT_S) == {}
    finally:
        part.kill()


async def test_what_a_full_disk_did_not_take_is_told_when_there_is_room(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.symlink_to("/dev/full")
    part = ChildProcess(ProcessSpec(name="part", argv=()), log, {})
    part._append(b"lost\n")
    log.unlink()
    part._append(b"kept\n")
    assert part.log_tail() == "(no room for 5 bytes of output)\nkept"
