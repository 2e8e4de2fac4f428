"""Makes each Python process of a stack note the files of ours whose functions run, while a file asks for it.

`tests.architecture.road` puts this folder on the path of the stack's processes. A thread waits for
`$ROAD/armed`. While that file is there, each call of a function of the project is noted: its file, and the
types of data that it was given or gave back and that carry the prompt or the answer. When the file is gone,
the process writes what it has noted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROAD = Path(os.environ["ROAD"])
ROOT = os.environ["ROAD_ROOT"] + "/"
# So many objects deep the prompt or the answer may stand in what carries it.
DEPTH = 2
# Members of one object, and items of one sequence, that are looked at.
WIDTH = 64
GENERATED = ("contract/stubs/", "contract/stubs/")


class Journey:
    """What this process has noted since it was asked to."""

    def __init__(self) -> None:
        self.is_armed = False
        self.files: dict[str, int] = {}
        self.carriers: dict[str, dict[str, str]] = {"prompt": {}, "answer": {}}
        self._sought: dict[str, Any] = {}
        self._names: dict[CodeType, str] = {}

    def arm(self, sought: dict[str, Any]) -> None:
        """Begins to note; `sought` has texts and token ids of prompt and answer."""
        self.files, self.carriers = {}, {"prompt": {}, "answer": {}}
        self._sought = {
            way: (tuple(each["texts"]), frozenset(each["ids"]), each["num_ids"])
            for way, each in sought.items()
        }
        self.is_armed = True

    def write(self) -> None:
        """Writes what was noted since."""
        self.is_armed = False
        noted = {"command": sys.orig_argv[1:], "files": self.files, "carriers": self.carriers}
        written = ROAD / f"{os.getpid()}.written"
        written.write_text(json.dumps(noted))
        # Whoever waits for the name finds the whole.
        written.rename(ROAD / f"{os.getpid()}.json")

    def note(self, frame: FrameType, event: str, value: Any) -> None:
        """Called by the interpreter at each call and return."""
        if not self.is_armed or event not in ("call", "return"):
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            path = code.co_filename
            is_ours = path.startswith(ROOT) and "/.venv/" not in path and "/tests/" not in path
            name = path.removeprefix(ROOT) if is_ours and code.co_name != "<module>" else ""
            self._names[code] = "" if name.startswith(GENERATED) else name
        if not name:
            return
        self.files.setdefault(name, len(self.files))
        if event == "return":
            self._look_at(value, name)
        else:
            for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._look_at(frame.f_locals.get(argument), name)

    def _look_at(self, value: Any, name: str) -> None:
        if not is_data(value):
            return
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        for way, sought in self._sought.items():
            if kind not in self.carriers[way] and carries(value, sought, DEPTH):
                self.carriers[way][kind] = name


def is_data(value: Any) -> bool:
    """Whether a value is of a type that represents something: a record of ours, or a message."""
    kind = type(value)
    if isinstance(value, type):
        return False
    if hasattr(kind, "DESCRIPTOR"):
        return True
    is_record = (
        dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__") or hasattr(kind, "_fields")
    )
    return is_record and not kind.__module__.startswith(("torch", "numpy", "ast"))


def members(value: Any) -> list[Any]:
    """What a record or a message holds."""
    kind = type(value)
    if hasattr(kind, "DESCRIPTOR"):
        return [held for _, held in value.ListFields()][:WIDTH]
    names: Any = getattr(kind, "__struct_fields__", getattr(kind, "_fields", None))
    if names is None:
        names = [field.name for field in dataclasses.fields(value)]
    return [getattr(value, name, None) for name in list(names)[:WIDTH]]


def carries(value: Any, sought: tuple[tuple[str, ...], frozenset[int], int], depth: int) -> bool:
    """Whether a text or enough token ids are found in a value, at most `depth` records deep."""
    texts, ids, num_ids = sought
    if isinstance(value, (str, bytes)):
        return any((text if isinstance(value, str) else text.encode()) in value for text in texts)
    if isinstance(value, dict):
        return any(carries(each, sought, depth) for each in list(value.values())[:WIDTH])
    if is_data(value):
        return depth > 0 and any(carries(each, sought, depth - 1) for each in members(value))
    if isinstance(value, (list, tuple)) or type(value).__name__.startswith("Repeated"):
        items = list(value)
        if items and all(isinstance(item, int) for item in items):
            return len(ids.intersection(items)) >= num_ids
        return any(carries(each, sought, depth) for each in items[:WIDTH] if not isinstance(each, int))
    return False


JOURNEY = Journey()


def watch() -> None:
    """Arms and writes, as the file comes and goes."""
    armed = ROAD / "armed"
    while True:
        if armed.exists() and not JOURNEY.is_armed:
            JOURNEY.arm(json.loads(armed.read_text()))
            (ROAD / f"{os.getpid()}.armed").touch()
        elif JOURNEY.is_armed and not armed.exists():
            JOURNEY.write()
        time.sleep(0.02)


def begin() -> None:
    """Starts to watch in this process."""
    threading.setprofile(JOURNEY.note)
    sys.setprofile(JOURNEY.note)
    threading.Thread(target=watch, name="road", daemon=True).start()


begin()
os.register_at_fork(after_in_child=begin)
