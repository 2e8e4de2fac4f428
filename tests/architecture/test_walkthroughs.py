"""CONTRIBUTING.md's walk-throughs list exactly the production files that name their examples."""

from __future__ import annotations

import re

import pytest

from tests.architecture.figures import naming
from tests.architecture.sources import MAKEFILES, ROOT

_PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
_SECTIONS = {
    section.splitlines()[0]: section for section in _PAGE.split("\n## ")[1:] if "\nExample: " in section
}


@pytest.mark.parametrize("title", _SECTIONS)
def test_a_walkthrough_lists_the_files_that_name_its_example(title: str) -> None:
    section = _SECTIONS[title]
    example = re.search(r"^Example: `(.+)`$", section, re.MULTILINE)
    assert example is not None
    listed = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(naming(f"(?:{example[1]})"))


def test_tests_and_commands_that_are_named_exist() -> None:
    for path in re.findall(r"`((?:tests|docs|benchmarks)/[\w/.]+)`", _PAGE):
        assert (ROOT / path).exists(), path
    rules = "\n".join(part.read_text(encoding="utf-8") for part in MAKEFILES)
    for target in re.findall(r"(?:^|`)make ([a-z0-9-]+)", _PAGE, re.MULTILINE):
        assert f"\n{target}:" in rules, target
