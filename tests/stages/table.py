"""The stages as table.toml declares them, and the digest of the files that one depends on."""

from __future__ import annotations

import hashlib
import subprocess
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.toml")
GREEN = ROOT / ".ci" / "green"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table, which says what the fields mean."""

    name: str
    command: str
    limit_minutes: float
    needs: str = ""
    after: str = ""
    is_foundation: bool = False
    depends_on: tuple[str, ...] = ()

    def digest(self, root: Path = ROOT) -> str:
        """SHA-256 over the row and over path, mode and content of all files that the globs match, in hex."""
        sum_of_all = hashlib.sha256(repr((self.command, self.needs, self.depends_on)).encode())
        for name in files(self.depends_on, root):
            path = root / name
            content = path.readlink().as_posix().encode() if path.is_symlink() else path.read_bytes()
            is_executable = bool(path.lstat().st_mode & 0o100)
            sum_of_all.update(f"\0{name}\0{is_executable:d}\0{len(content)}\0".encode() + content)
        return sum_of_all.hexdigest()

    @property
    def mark(self) -> Path:
        """The file that holds the digest of the last run that was green."""
        return GREEN / self.name

    def is_unchanged(self) -> bool:
        """Whether the files are those that it last passed with. Without globs it depends on everything."""
        return bool(self.depends_on) and self.mark.exists() and self.mark.read_text().strip() == self.digest()


def files(globs: tuple[str, ...], root: Path = ROOT) -> list[str]:
    """Paths that git knows, or would add, and that a glob matches.

    `!` before a glob leaves out what it matches; `*` stays within one folder, `**` does not.
    """
    patterns = [f":(exclude,glob){glob[1:]}" if glob.startswith("!") else f":(glob){glob}" for glob in globs]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    told = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in told.split("\0") if name and (root / name).is_file()})


def read_table(path: Path = TABLE) -> list[Stage]:
    """All stages in their order. Raises ValueError for a key that no row has."""
    known = {field.name for field in fields(Stage)} - {"name"}
    stages = []
    for name, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
        if unknown := row.keys() - known:
            raise ValueError(f"{path}: [{name}] has {', '.join(sorted(unknown))}; known are {sorted(known)}")
        stages.append(Stage(name=name, **row | {"depends_on": tuple(row.get("depends_on", ()))}))
    return stages
