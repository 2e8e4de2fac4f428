"""Rules of a compiled grammar that derive no finite text, whichever front end they came from.

The library shows the rules that it has compiled in its log alone, which it writes to the process's standard
error: it is read from there, in a process that does nothing else meanwhile. A symbol that is not understood
counts as finite, so nothing is refused by mistake.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

# From this level on the log has the rules of grammars of any size.
LOG_LEVEL = 3
_RULES = "\nGrammar:\n"
# A terminal that matches no text.
_EMPTY_TERMINAL = re.compile(r"^  \[(\d+)\] .* \(ExprRef ∅\)", re.MULTILINE)
_ERROR_STREAM = 2


@contextmanager
def logged() -> Iterator[list[str]]:
    """What libraries write to standard error inside the block, as the list's one text after it."""
    log: list[str] = []
    sys.stderr.flush()
    target, before = os.memfd_create("log"), os.dup(_ERROR_STREAM)
    os.dup2(target, _ERROR_STREAM)
    try:
        yield log
    finally:
        os.dup2(before, _ERROR_STREAM)
        os.close(before)
        with open(target, "rb") as written:
            written.seek(0)
            log.append(written.read().decode(errors="replace"))


def endless_rules(log: str) -> list[str]:
    """Names of the rules that derive no finite text and that the start can come to, in the log's order."""
    head, _, rest = log.partition(_RULES)
    alternatives: dict[str, list[list[str]]] = {}
    name = ""
    for line in rest.partition("\nstats: ")[0].splitlines():
        left, arrow, right = line.partition(" ⇦ ")
        if arrow:
            name = left.strip() or name
            alternatives.setdefault(name, []).append(right.split())
    empty = {f"[{number}]" for number in _EMPTY_TERMINAL.findall(head)}
    endless = alternatives.keys() - _finite(alternatives, empty)
    reached, pending = {"start"}, ["start"]
    while endless and pending:
        for symbol in {each for symbols in alternatives.get(pending.pop(), ()) for each in symbols} - reached:
            reached.add(symbol)
            pending.append(symbol)
    return [each for each in alternatives if each in endless and each in reached]


def _finite(alternatives: dict[str, list[list[str]]], empty: set[str]) -> set[str]:
    """The least fixpoint: rules with an alternative whose symbols are all terminals or finite rules."""
    users: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    missing: list[int] = []
    ready: list[str] = []
    for name, choices in alternatives.items():
        for symbols in choices:
            needed = {each for each in symbols if each in alternatives or each in empty}
            for each in needed:
                users[each].append((name, len(missing)))
            missing.append(len(needed))
            if not needed:
                ready.append(name)
    finite: set[str] = set()
    while ready:
        name = ready.pop()
        if name in finite:
            continue
        finite.add(name)
        for user, choice in users[name]:
            missing[choice] -= 1
            if not missing[choice]:
                ready.append(user)
    return finite
