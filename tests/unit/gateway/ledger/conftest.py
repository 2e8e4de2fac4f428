"""A real PostgreSQL, where one is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    folder = _BINARIES[-1] if _BINARIES else Path(shutil.which("postgres") or "/nowhere").parent
    if not (folder / "initdb").exists():
        pytest.skip("PostgreSQL is not installed")
    pytest.importorskip("psycopg")
    # It refuses to run as root, and needs a directory of its own.
    account: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="millrace-pg-") as home:
        if account:
            shutil.chown(home, **account)
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": home}
        subprocess.run(
            [folder / "initdb", "-D", f"{home}/data", "-A", "trust", "-U", "millrace", "--no-sync"],
            check=True,
            **quiet,
            **account,
        )
        options = f"-c listen_addresses='' -c unix_socket_directories='{home}' -c fsync=off"
        control = [folder / "pg_ctl", "-D", f"{home}/data", "-w", "-o", options]
        subprocess.run([*control, "start"], check=True, **quiet, **account)
        yield f"postgresql+psycopg://millrace@/postgres?host={home}"
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, **quiet, **account)
