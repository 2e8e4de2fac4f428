"""Design pages stay one page, decisions short, and every page names files that exist."""

from __future__ import annotations

import re

import pytest

from tests.architecture.sources import ROOT, committed_files

_PAGES = [name for name in committed_files() if name.endswith(".md")]
_DESIGNS = [name for name in _PAGES if name.endswith("DESIGN.md")]
_DECISIONS = [name for name in _PAGES if name.startswith("docs/decisions/")]
# A path from the root; those with placeholders (*, <name>, NAME) are none. contract/ has a proto/, too.
_FOLDERS = (
    "benchmarks|config|contract|docs|engine|gateway|k8s|models|observability|services|tests|tokenizer_svc"
)
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./-]+)`")
_LINK = re.compile(r"\]\(([\w./-]+)\)")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", _DESIGNS)
def test_a_design_is_one_page_with_a_picture_and_without_dates(name: str) -> None:
    assert len(_text(name).split()) <= 900
    # Of what calls what, as plain text in a code block.
    assert re.search(r"^(?:```|    \S)", _text(name), re.MULTILINE)
    # History and figures are the decisions' and the records'.
    assert re.search(r"(?<!decisions/)\b20\d\d-\d\d-\d\d\b", _text(name)) is None


@pytest.mark.parametrize("name", _DECISIONS)
def test_a_decision_is_dated_and_short(name: str) -> None:
    assert re.match(r"docs/decisions/20\d\d-\d\d-\d\d-[a-z0-9-]+\.md", name)
    # A page has everything that was decided on one subject, with what was rejected: hence few pages.
    assert len(_text(name).split()) <= 400


def test_decisions_are_merged_by_subject() -> None:
    assert len(_DECISIONS) <= 40


@pytest.mark.parametrize("name", _PAGES)
def test_a_page_names_files_that_exist(name: str) -> None:
    folder = (ROOT / name).parent
    missing = [
        path for path in _PATH.findall(_text(name)) if "NAME" not in path and not (ROOT / path).exists()
    ]
    missing += [path for path in _LINK.findall(_text(name)) if not (folder / path).exists()]
    assert not missing
