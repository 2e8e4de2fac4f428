"""Runs a command in an image's place on this machine: its files, packages, user and environment.

Where this machine lets us mount, the root file system is read-only but for what the deployment declares.
What a container engine adds besides is not there: tests/containers have a real one.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.deployment.containerfile import REPOSITORY, Context, Dockerfile, lay_out_packages

_USER = 10001


def can_switch_user() -> bool:
    """Whether commands can run as the containers' user, who must be able to read the interpreter."""
    if os.geteuid() != 0:
        return False
    try:
        tried = subprocess.run([sys.executable, "-c", ""], user=_USER, check=False, capture_output=True)
    except PermissionError:
        # The interpreter lies in somebody's home folder.
        return False
    return tried.returncode == 0


# Arguments: the deployment's folder under /tmp, what becomes /tmp and whether "rw" or "ro", the working
# folder, the user, the interpreter's installation and the closed folder that it lies in (or ""), the checkout
# when that lies below /tmp (or ""), folders that may be written to, "--", the command.
_CONFINE = """
set -e
root=$1 scratch=$2 mode=$3 folder=$4 user=$5 python=$6 closed=$7 checkout=$8
shift 8
mount --make-rprivate /
if [ -n "$closed" ]; then
    # Nothing of it but the interpreter is there, and that can be reached.
    mkdir -p "$scratch.home/${python#"$closed"/}"
    mount --bind "$python" "$scratch.home/${python#"$closed"/}"
    mount --rbind "$scratch.home" "$closed"
fi
mount --bind "$root" "$root"
while [ "$1" != -- ]; do mount --bind "$1" "$1"; shift; done
shift
mkdir -p "$scratch/${root#/tmp/}"
mount --rbind "$root" "$scratch/${root#/tmp/}"
if [ -n "$checkout" ]; then
    mkdir -p "$scratch/${checkout#/tmp/}"
    mount --bind "$checkout" "$scratch/${checkout#/tmp/}"
    mount -o remount,bind,ro "$scratch/${checkout#/tmp/}"
fi
mount --rbind "$scratch" /tmp
[ "$mode" = rw ] || mount -o remount,bind,ro /tmp
mount -o remount,bind,ro "$root"
# Paths that a container engine makes writable on a read-only root as well: /dev, with its shm, and /proc.
while read -r _ _ _ _ point _; do
    case $point in
        /dev|/dev/*|/proc|/proc/*|/sys|/sys/*|/tmp|/tmp/*) ;;
        *) mount -o remount,bind,ro "$point" ;;
    esac
done < /proc/self/mountinfo
cd "$folder"
exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all --bounding-set=-all \
    --no-new-privs "$@"
"""


@dataclass(frozen=True)
class Confinement:
    """A read-only root file system: only `writable` folders can be changed, and with `own_tmp` a /tmp."""

    root: Path
    scratch: Path
    own_tmp: bool
    writable: tuple[Path, ...]

    def wrap(self, argv: Sequence[str], folder: Path) -> list[str]:
        """The command that runs `argv` in `folder` so, as the containers' user without capabilities."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.scratch.chmod(0o1777)
        writable = [str(path) for path in self.writable]
        python = Path(sys.base_prefix).resolve()
        setting = [str(self.root), str(self.scratch), "rw" if self.own_tmp else "ro"]
        checkout = Path(__file__).resolve().parents[2]
        below_tmp = str(checkout) if Path("/tmp") in checkout.parents else ""
        setting += [str(folder), str(_USER), str(python), _closed(python), below_tmp]
        return ["unshare", "--mount", "/bin/sh", "-c", _CONFINE, "sh", *setting, *writable, "--", *argv]


def _closed(path: Path) -> str:
    """The outermost folder on the way to `path` that others may not pass, "" when there is none."""
    for folder in reversed((path, *path.parents)):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return str(folder)
    return ""


def can_confine() -> bool:
    """Whether this machine lets us mount, which takes root and its capabilities."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return False
    probe = "mount --make-rprivate / && mount --bind /tmp /tmp && mount -o remount,bind,ro /tmp"
    tried = subprocess.run(
        ["unshare", "--mount", "/bin/sh", "-c", probe], check=False, capture_output=True, timeout=30
    )
    return tried.returncode == 0


class Image:
    """The files of an image under a folder of this machine."""

    def __init__(self, dockerfile: Dockerfile, root: Path) -> None:
        self.dockerfile = dockerfile
        self.root = root
        context = Context()
        for target, source in dockerfile.files().items():
            context.copy(source, root / target.lstrip("/"))
        packages = root / "opt/venv/packages"
        lay_out_packages(dockerfile.requirements(), packages)
        self._install_metadata(packages)
        # `python` in the image is this interpreter, with the image's packages and no others.
        python = root / "opt/venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(
            f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec {sys.executable} -S "$@"\n',
            encoding="utf-8",
        )
        python.chmod(0o755)

    def _install_metadata(self, packages: Path) -> None:
        """Runs the part of the Dockerfile that makes the project count as installed."""
        build = self.root / "build"
        build.mkdir()
        (build / "pyproject.toml").write_bytes((REPOSITORY / "pyproject.toml").read_bytes())
        script = (REPOSITORY / "services/finish_image.sh").read_text()
        # Modes are those of the image that is built, and byte code is made there.
        script = re.sub(r"^(chmod|python -m compileall) .*$", "", script, flags=re.MULTILINE)
        script = re.sub(r"^metadata=.*(?=/millrace)", f"metadata={packages}", script, flags=re.MULTILINE)
        subprocess.run(["/bin/sh", "-c", script], cwd=build, check=True)

    def environment(self) -> dict[str, str]:
        """ENV of the image with paths of this machine."""
        found = {name: self.locate(value) for name, value in self.dockerfile.environment().items()}
        found["PATH"] = f"{self.root}/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"
        return found

    def locate(self, text: str) -> str:
        """Absolute paths of the image as paths of this machine."""
        return re.sub(r"(?<![\w./-])/(app|etc|opt)(?=[/:\s\"']|$)", rf"{self.root}/\1", text)


class Container:
    """One running command."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        *,
        as_user: bool,
        confinement: Confinement | None = None,
    ) -> None:
        self.argv = confinement.wrap(argv, folder) if confinement else list(argv)
        self.log = log
        self._process = subprocess.Popen(
            self.argv,
            env={"HOME": "/nonexistent", "LANG": "C.UTF-8", **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **({"user": _USER, "group": _USER, "extra_groups": []} if as_user and not confinement else {}),
        )

    def wait_for_line(self, start: str) -> str:
        """The first line that begins with `start`; fails with the log when the command ends before it, or
        when the test's time is up.
        """
        try:
            while True:
                has_ended = self._process.poll() is not None
                for line in self.log.read_text(errors="replace").splitlines():
                    if line.startswith(start):
                        return line
                assert not has_ended, f"{self.argv} ended with {self._process.returncode}"
                time.sleep(0.1)
        except BaseException as error:
            error.add_note(self.log.read_text(errors="replace")[-4000:])
            raise

    def wait(self) -> int:
        """Exit status of a command that ends by itself."""
        return self._process.wait()

    def terminate(self) -> int:
        """SIGTERM, as a container is stopped; the exit status."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            raise

    def kill(self) -> None:
        """Ends whatever is left of it."""
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            return
        self._process.wait()


def give_to_user(path: Path, *, as_user: bool) -> None:
    """Makes a folder that the containers' user may write to."""
    path.mkdir(parents=True, exist_ok=True)
    if as_user:
        os.chown(path, _USER, _USER)


def open_to_all(path: Path) -> None:
    """Lets other users pass through the folders that lead to `path`."""
    for folder in (path, *path.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
