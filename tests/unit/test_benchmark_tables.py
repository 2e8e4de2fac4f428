"""The page of tables is what the records say, and every record has a program that prints it."""

from __future__ import annotations

import importlib.util

from benchmarks.tables import COMMANDS, PAGE, RESULTS, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m benchmarks.tables`"


def test_every_record_has_a_program() -> None:
    modules = {f"benchmarks.{command.split()[0]}" for command in COMMANDS.values()}
    assert not [module for module in modules if importlib.util.find_spec(module) is None]
    elsewhere = ("peers_", "turns_", "forms_", "quantization", "kernels_compiled_ahead")
    begins = (*COMMANDS, *elsewhere)
    records = {path.stem for path in RESULTS.glob("*.json")}
    assert not {name for name in records if not name.startswith(begins)}
    assert not {begin for begin in begins if not any(name.startswith(begin) for name in records)}
