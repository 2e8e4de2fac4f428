"""`python -m services.third_party_images`: images of others, and which were not looked at for too long."""

from __future__ import annotations

import datetime
import sys
import tomllib
from pathlib import Path

import msgspec

LIST = Path(__file__).with_suffix(".toml")


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image, its purpose, and the day on which somebody last saw that nothing newer is needed."""

    image: str
    why: str
    seen: datetime.date
    digest: str = ""

    @property
    def reference(self) -> str:
        """As deployments name it."""
        return f"{self.image}@{self.digest}" if self.digest else self.image


class Images(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole list."""

    max_age_days: int
    images: tuple[Image, ...]


def read_list() -> Images:
    """What third_party_images.toml says."""
    return msgspec.convert(tomllib.loads(LIST.read_text(encoding="utf-8")), Images)


def main(today: datetime.date) -> int:
    """Prints every image with its age in days, and which lack a digest; 1 when one is too old, else 0."""
    listed = read_list()
    status = 0
    for each in listed.images:
        age = (today - each.seen).days
        is_old = age > listed.max_age_days
        remarks = "" if each.digest else "  no digest"
        remarks += "  TOO OLD: look for a newer release" if is_old else ""
        print(f"{each.reference}  {age} days{remarks}")
        status |= is_old
    num_open = sum(not each.digest for each in listed.images)
    if num_open:
        print(
            f"{num_open} of {len(listed.images)} are pinned by their tags alone: see the head of {LIST.name}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(datetime.datetime.now(datetime.UTC).date()))
