"""The project's figures stay within their bounds: `python -m tests.architecture.figures` prints them."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from tests.architecture import figures
from tests.architecture.sources import PACKAGES, python_sources

LONGEST_FUNCTION = 80
# Of a hundred functions, the longest but one.
MOST_LINES_OF_99_IN_100 = 40
MOST_PARAMETERS = 12


def test_imports_run_in_no_circle() -> None:
    assert figures.import_circles(python_sources(*PACKAGES)) == []


def _sizes() -> dict[str, int]:
    return {place: lines for place, lines, _ in figures.functions(python_sources(*PACKAGES))}


def test_no_function_is_longer_than_two_screens() -> None:
    assert not {place: lines for place, lines in _sizes().items() if lines > LONGEST_FUNCTION}


def test_nearly_all_functions_are_read_on_one_screen() -> None:
    sizes = _sizes()
    long = {place: lines for place, lines in sizes.items() if lines > MOST_LINES_OF_99_IN_100}
    assert figures.percentile_99(list(sizes.values())) <= MOST_LINES_OF_99_IN_100, long


def test_functions_take_few_parameters() -> None:
    taken = {
        place: count
        for place, _, count in figures.functions(python_sources(*PACKAGES))
        if not place.startswith(figures.KERNELS)
    }
    assert not {place: count for place, count in taken.items() if count > MOST_PARAMETERS}


@pytest.mark.parametrize(
    ("word", "most"), [(figures.OPTION, 9), (figures.STATISTIC, 9), (figures.NORM, 8)], ids=str
)
def test_what_is_said_once_is_named_in_few_files(word: str, most: int) -> None:
    """An option is declared in the contract and named again by what computes with it; so is a statistic."""
    files = figures.naming(word)
    assert len(files) <= most, f"{word} is named in {files}; derive it from its declaration"


def test_a_family_with_a_feature_of_its_own_touches_few_files() -> None:
    files = figures.of_one_family(figures.FEATURE)
    assert len(files) <= 5, files
    assert len({PurePath(name).parent for name in files}) <= 2, files
