"""A full disk stops nobody, keeps nobody from coming back, and costs the ledger no answer."""

from __future__ import annotations

import pytest

from benchmarks.full_disk import run


def test_who_is_killed_while_the_disk_is_full_and_afterwards_comes_back_and_the_books_are_whole() -> None:
    try:
        figures = run(seconds=6.0)
    except PermissionError as error:
        pytest.skip(str(error))
    assert figures["answers"]
    assert figures["answers_without_a_row"] == figures["counted_as_missing"] == 0, figures
    assert figures["answers_with_other_tokens"] == 0, figures
