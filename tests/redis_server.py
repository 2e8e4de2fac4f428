"""A real Redis for the tests that need one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis


class RedisServer:
    """A redis-server on a socket file, that can be stopped and started again with nothing in it."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("redis-server is not installed")
        self._socket = folder / "socket"
        self._command = [binary, "--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(
            [*self._command, "--appendonly", "no"], stdout=subprocess.DEVNULL, cwd=self._socket.parent
        )
        # The file is there before anybody listens at it.
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended"
            time.sleep(0.005)

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

    def hang(self) -> None:
        """Stops it: connections stay, what is sent waits for it, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets it go on with what was sent to it meanwhile."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._socket.unlink(missing_ok=True)
