"""Names of the files of a GGUF model that is split (`gguf-split`): name-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re

_PART = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """All files of the model to which the file `name`, of any folder, belongs, the first one first."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)] or [name]


def is_later_part(name: str) -> bool:
    """Whether a file is part of a model and not its first, which has the metadata."""
    match = _PART.fullmatch(name)
    return match is not None and match["index"] != "00001"
