"""The clients, and for each an environment of its own with what pins.toml says."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

FOLDER = Path(__file__).resolve().parent
_PINS = FOLDER / "pins.toml"
_INSTALL_LIMIT_S = 1200


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One client; of `pip`, `npm` and `debian` it has one."""

    name: str
    group: str
    program: str
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    # It needs torch, whose build for CPUs is installed before.
    torch: bool = False
    receives_traces: bool = False

    @property
    def folder_name(self) -> str:
        """Its name as that of a folder, of a tenant and of a key."""
        return "".join(each if each.isalnum() else "-" for each in self.name.lower()).strip("-")


class Pins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """pins.toml."""

    uploaded_before: str
    clients: tuple[Client, ...]


class NotInstalled(Exception):
    """What the installer said in the end."""


def read_pins() -> Pins:
    """All clients."""
    return msgspec.convert(tomllib.loads(_PINS.read_text(encoding="utf-8")), Pins)


class Environments:
    """Folders below `root`, made when they are asked for; those that are as pinned are taken as they are."""

    def __init__(self, root: Path, pins: Pins, torch: Sequence[str]) -> None:
        """`torch` is what pip installs where a client needs it."""
        self._root, self._pins, self._torch = root, pins, torch

    def folder(self, client: Client) -> Path:
        """Where the client's environment is."""
        return self._root / client.folder_name

    def make(self, client: Client) -> None:
        """Installs what the client needs. Raises NotInstalled."""
        folder = self.folder(client)
        made = hashlib.sha256(
            msgspec.json.encode((client, self._pins.uploaded_before, sys.version))
        ).hexdigest()
        mark = folder / "made"
        if mark.exists() and mark.read_text(encoding="utf-8") == made:
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if client.pip:
            self._pip(client, folder)
        elif client.npm:
            command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
            command += ["--before", self._pins.uploaded_before, "--prefix", str(folder)]
            _run(*command, *client.npm)
        else:
            _unpack(client, folder)
        mark.write_text(made, encoding="utf-8")

    def _pip(self, client: Client, folder: Path) -> None:
        _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        pip += ["install", "--quiet", "--no-warn-script-location", "--disable-pip-version-check"]
        if client.torch:
            _run(*pip, *self._torch)
        _run(*pip, "--uploaded-prior-to", self._pins.uploaded_before, *client.pip)

    def command(self, client: Client) -> list[str]:
        """How the client's program is started. Node finds packages only beside its programs."""
        folder, program = self.folder(client), FOLDER / client.program
        if not client.npm:
            python = folder / "bin" / "python" if client.pip else Path(sys.executable)
            return [str(python), str(program)]
        shutil.copytree(program.parent, folder / "programs", dirs_exist_ok=True)
        return ["node", str(folder / "programs" / program.name)]


def _unpack(client: Client, folder: Path) -> None:
    """Debian's packages without installing them."""
    if not _succeeds("apt-get", "download", *client.debian, cwd=folder):
        _run("apt-get", "update", "-qq")
        _run("apt-get", "download", *client.debian, cwd=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(folder))
        package.unlink()


def _succeeds(*command: str, cwd: Path) -> bool:
    try:
        _run(*command, cwd=cwd)
    except NotInstalled:
        return False
    return True


def _run(*command: str, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "PIP_NO_INPUT": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from error
    if done.returncode:
        raise NotInstalled((done.stdout + done.stderr).strip()[-2000:])
