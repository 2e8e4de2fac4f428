"""What came out, client by feature, as tables of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.clients.environments import Client
from tests.clients.fields import section

_HEAD = """# Clients

What programs that nobody here wrote do with one stack of the bundled model, and one of models that pool,
through Envoy. A cell is `works`,
or the client's own exception, which tells what the stack has refused by name; `make test-clients` allows
nothing else, and writes this page. An empty cell was not tried. Versions: `tests/clients/pins.toml`.
"""


# What a client told, one feature a line, in its folder.
RESULTS = "results.jsonl"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a client's program told of one feature: "works", "refused" or "failed"."""

    feature: str
    outcome: str
    # The exception's name where it was refused, else what went wrong.
    detail: str = ""

    @property
    def cell(self) -> str:
        """For people."""
        return f"refused: `{self.detail}`" if self.outcome == "refused" else self.outcome


def read_results(folder: Path) -> list[Result]:
    """What a client told; nothing where it has not run."""
    told = folder / RESULTS
    lines = told.read_bytes().splitlines() if told.exists() else []
    return [msgspec.json.decode(line, type=Result) for line in lines]


def page(results: Mapping[str, Sequence[Result]], clients: Sequence[Client]) -> str:
    """The whole page: a table for each group of clients, whose features are rows."""
    parts = [_HEAD]
    for group in dict.fromkeys(each.group for each in clients):
        names = [each.name for each in clients if each.group == group]
        parts.append(f"## {group}\n\n{_table(names, results)}\n")
    return "\n".join([*parts, section()])


def _table(names: Sequence[str], results: Mapping[str, Sequence[Result]]) -> str:
    cells = {(each.feature, name): each.cell for name in names for each in results[name]}
    features = dict.fromkeys(feature for feature, _ in cells)
    rows = [["feature", *names], ["---"] * (len(names) + 1)]
    rows += [[feature, *(cells.get((feature, name), "") for name in names)] for feature in features]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
