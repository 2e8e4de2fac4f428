"""`python -m services.image_digests`: pins the images of others by the digests that their registries have.

Every file that names such an image gets its digest behind the tag, and so does the list. Nothing is written
unless all of them were found. Docker asks, with the mirrors and passwords that it knows.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.third_party_images import LIST, read_list

_REPOSITORY = Path(__file__).resolve().parents[1]
# Files that name images. A test compares their names with the list.
_FILES = ("*.yml", "k8s/**/*.yaml", "services/*/Dockerfile*")
_DIGEST = r"sha256:[0-9a-f]{64}"


class DigestError(Exception):
    """A digest cannot be had; the message says why, and what to do."""


def digest_of(image: str) -> str:
    """Of an image by its tag, as its registry has it now. Raises DigestError."""
    _docker("pull", "--quiet", image)
    digests = _docker("image", "inspect", "--format", "{{range .RepoDigests}}{{println .}}{{end}}", image)
    # One that has several names has a digest by each of them.
    repository = image.rpartition(":")[0]
    for line in digests.split():
        if match := re.fullmatch(rf"{re.escape(repository)}@({_DIGEST})", line):
            return match[1]
    raise DigestError(
        f"{image}: it was made here and no registry knows its digest: docker image rm {image}, and repeat"
    )


def _docker(*words: str) -> str:
    try:
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise DigestError(
            f"docker cannot be started ({error}); install it, or name its folder in PATH"
        ) from error
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise DigestError(
            f"{words[-1]}: docker {words[0]} ended with {said!r}; repeat it where its registry can be reached"
        )
    return done.stdout


def pinned(text: str, digests: Mapping[str, str]) -> str:
    """A file that names images, with the digest behind each tag; of a Dockerfile's base the tag may be the
    default of an argument.
    """
    for image, digest in digests.items():
        repository, _, tag = image.rpartition(":")
        text = re.sub(rf"(?<![\w./-]){re.escape(image)}(?:@{_DIGEST})?(?![\w.@-])", f"{image}@{digest}", text)
        for name in re.findall(rf"^FROM {re.escape(repository)}:\$\{{(\w+)\}}", text, re.MULTILINE):
            default = rf"^ARG {name}={re.escape(tag)}(?:@{_DIGEST})?$"
            text = re.sub(default, f"ARG {name}={tag}@{digest}", text, flags=re.MULTILINE)
    return text


def listed(text: str, digests: Mapping[str, str]) -> str:
    """The list, with the digest in each image's table."""
    head, *tables = re.split(r"^(?=\[\[images\]\]$)", text, flags=re.MULTILINE)
    for number, table in enumerate(tables):
        (image,) = re.findall(r'^image = "(.+)"$', table, re.MULTILINE)
        bare = re.sub(r"^digest = .*\n", "", table, flags=re.MULTILINE)
        line = f'image = "{image}"\n'
        tables[number] = bare.replace(line, f'{line}digest = "{digests[image]}"\n')
    return "".join((head, *tables))


def _places(folder: Path) -> Iterator[Path]:
    for pattern in _FILES:
        yield from sorted(folder.glob(pattern))


def main(folder: Path = _REPOSITORY) -> int:
    """Prints the digests and which files changed; 1 with one clear line when a digest cannot be had."""
    digests: dict[str, str] = {}
    try:
        for each in read_list().images:
            digests[each.image] = digest_of(each.image)
            print(f"{each.image}@{digests[each.image]}")
    except DigestError as error:
        print(error, file=sys.stderr)
        return 1
    for path in (folder / LIST.relative_to(_REPOSITORY), *_places(folder)):
        before = path.read_text(encoding="utf-8")
        after = listed(before, digests) if path.name == LIST.name else pinned(before, digests)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"written: {path.relative_to(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
