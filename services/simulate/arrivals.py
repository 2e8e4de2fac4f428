"""The requests of a simulated load: read from a public form of trace, or generated from a seed.

Mooncake's form is a line of JSON for each request (`timestamp` in milliseconds, `input_length`,
`output_length`, and `hash_ids`, each of which stands for 512 tokens and all before them; Qin et al., FAST
2025). Azure's is CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`: github.com/Azure/AzurePublicDataset).
Both may name `tenant` and `tier` beside that. What is wrong is told with its line.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from runtime.errors import ConfigError
from services.bench.workload import MAX_LENGTH, Lengths

# Tokens that one of Mooncake's hash ids stands for.
HASH_TOKENS = 512
MOST_HASH_ID = 1 << 30
# Token ids are drawn from so many. What is generated is one of them that no prompt is made of.
_VOCABULARY = 32_000
_TABLE_TOKENS = 1 << 16


class ArrivingRequest(NamedTuple):
    """One request: when it comes (seconds from the beginning), and how long it is, in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    # "" is the tenant's own.
    tier: str = ""
    # What its prompt begins with, HASH_TOKENS each; prompts share what both begin with.
    hash_ids: tuple[int, ...] = ()


class PromptMaker:
    """Token ids of prompts. Those of equal hash ids are equal; else no two share their first block."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self._table = tuple(rng.randrange(_VOCABULARY) for _ in range(_TABLE_TOKENS))

    def ids(self, arrival: ArrivingRequest, number: int) -> tuple[int, ...]:
        """The ids of the request with this number, which is used by no other."""
        wanted, parts = arrival.prompt_tokens, []
        for hash_id in arrival.hash_ids:
            parts.append(self._run(_VOCABULARY + 2 * hash_id, min(HASH_TOKENS, wanted)))
            wanted -= HASH_TOKENS
            if wanted <= 0:
                break
        if wanted > 0:
            parts.append(self._run(_VOCABULARY + 2 * number + 1, wanted))
        return parts[0] if len(parts) == 1 else tuple(token for part in parts for token in part)

    def _run(self, first: int, num_tokens: int) -> tuple[int, ...]:
        """So many ids, of which the first is all that is special: hashes of blocks are chained."""
        start, rest = first % 4096, num_tokens - 1
        run = self._table[start : start + rest]
        while len(run) < rest:
            run += self._table[: rest - len(run)]
        return (first, *run)


# --- traces -----------------------------------------------------------------------------------------------


def read_trace(path: Path, tiers: Collection[str]) -> list[ArrivingRequest]:
    """The requests of a trace in the order of their times, the first at 0. Raises ConfigError with the line
    that cannot be meant, and OSError.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    first = next((line for line in text.splitlines() if line.strip()), "")
    if not first:
        raise ConfigError(f"{path}: no request; a trace has a line for each")
    read = _mooncake if first.lstrip().startswith("{") else _azure
    arrivals = list(read(path, text, tiers))
    if not arrivals:
        raise ConfigError(f"{path}: a heading and no request; a trace has a line for each")
    arrivals.sort(key=lambda each: each.at_s)
    start_s = arrivals[0].at_s
    return [each._replace(at_s=each.at_s - start_s) for each in arrivals]


def _mooncake(path: Path, text: str, tiers: Collection[str]) -> Iterator[ArrivingRequest]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: not JSON ({error}); each line is one request") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: expected an object with timestamp, input_length, output_length")
        hash_ids = fields.get("hash_ids", [])
        known = isinstance(hash_ids, list) and all(
            type(each) is int and 0 <= each < MOST_HASH_ID for each in hash_ids
        )
        if not known:
            raise ConfigError(f"{where}: hash_ids: expected a list of whole numbers from 0 to {MOST_HASH_ID}")
        yield ArrivingRequest(
            _seconds(where, "timestamp", fields) / 1000,
            _length(where, "input_length", fields),
            _length(where, "output_length", fields),
            _name(where, "tenant", fields),
            _tier(where, fields, tiers),
            tuple(hash_ids),
        )


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _azure(path: Path, text: str, tiers: Collection[str]) -> Iterator[ArrivingRequest]:
    rows = csv.reader(text.splitlines())
    heading = [name.strip() for name in next(rows, [])]
    missing = [name for name in _AZURE if name not in heading]
    if missing:
        raise ConfigError(
            f"{path}, line 1: no column {missing[0]}; a trace is CSV with {', '.join(_AZURE)}, or lines of "
            "JSON with timestamp, input_length and output_length"
        )
    for row in rows:
        if not row:
            continue
        where = f"{path}, line {rows.line_num}"
        if len(row) != len(heading):
            raise ConfigError(f"{where}: {len(row)} fields, the heading has {len(heading)}")
        fields: dict[str, Any] = dict(zip(heading, (each.strip() for each in row), strict=True))
        yield ArrivingRequest(
            _moment(where, fields["TIMESTAMP"]),
            _length(where, "ContextTokens", fields),
            _length(where, "GeneratedTokens", fields),
            _name(where, "tenant", fields),
            _tier(where, fields, tiers),
        )


def _field(where: str, name: str, fields: Mapping[str, Any]) -> Any:
    if name not in fields:
        raise ConfigError(f"{where}: no field {name}")
    return fields[name]


def _seconds(where: str, name: str, fields: Mapping[str, Any]) -> float:
    value = _field(where, name, fields)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {name}: {value!r} is not a number")
    if value < 0:
        raise ConfigError(f"{where}: {name}: {value} is before the beginning; times are 0 or more")
    return float(value)


def _moment(where: str, text: str) -> float:
    """A date with time, or seconds."""
    try:
        # Azure writes seven digits of a second; what is beyond microseconds is left out.
        whole, _, fraction = text.partition(".")
        moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
        return moment.timestamp() + (float(f"0.{fraction[:6]}") if fraction else 0.0)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP: {text!r} is neither a date nor seconds") from None
    return _seconds(where, "TIMESTAMP", {"TIMESTAMP": value})


def _length(where: str, name: str, fields: Mapping[str, Any]) -> int:
    value = _field(where, name, fields)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int:
        raise ConfigError(f"{where}: {name}: {value!r} is not a whole number of tokens")
    if not 1 <= value <= MAX_LENGTH:
        raise ConfigError(f"{where}: {name}: {value} tokens; expected 1 to {MAX_LENGTH:,}")
    return value


def _name(where: str, name: str, fields: Mapping[str, Any]) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name}: {value!r} is not a name")
    return value


def _tier(where: str, fields: Mapping[str, Any], tiers: Collection[str]) -> str:
    tier = _name(where, "tier", fields)
    if tier and tier not in tiers:
        raise ConfigError(f"{where}: tier: there is no [tiers.{tier}]; known: {', '.join(sorted(tiers))}")
    return tier


# --- generated loads --------------------------------------------------------------------------------------

Pattern = Literal["poisson", "bursts", "diurnal"]
# Of `bursts`: so many seconds, of which the first part has several times the rate of the rest.
_BURST_PERIOD_S, _BURST_PART, _BURST_RATE = 60.0, 0.1, 5.0
# Of `diurnal`: the night's rate as a share of the noon's.
_NIGHT = 0.2
_DAY_S = 86_400.0


class GeneratedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load that is drawn: `rate` requests per second on average, over so many seconds."""

    pattern: Pattern = "poisson"
    rate: float = 1.0
    duration_s: float = 600.0
    input_tokens: Lengths
    output_tokens: Lengths
    num_tenants: int = 1
    # Tier to its share of the requests; empty asks for none.
    tiers: Mapping[str, float] = {}

    def arrivals(self, seed: int) -> list[ArrivingRequest]:
        """The requests. A Poisson process whose rate follows the pattern, by thinning."""
        from numpy.random import default_rng

        rng = random.Random(seed)
        times: list[float] = []
        most = max(self._rate_at(at) for at in self._corners())
        now = rng.expovariate(most)
        while now < self.duration_s:
            if rng.random() * most < self._rate_at(now):
                times.append(now)
            now += rng.expovariate(most)
        generator = default_rng(seed)
        prompts = self.input_tokens.draw(generator, len(times))
        outputs = self.output_tokens.draw(generator, len(times))
        names = list(self.tiers)
        upto = list(accumulate(self.tiers.values()))
        return [
            ArrivingRequest(
                at_s,
                prompts[index],
                outputs[index],
                f"tenant-{rng.randrange(self.num_tenants)}",
                rng.choices(names, cum_weights=upto)[0] if names else "",
            )
            for index, at_s in enumerate(times)
        ]

    def _corners(self) -> Sequence[float]:
        return (0.0, _BURST_PERIOD_S * _BURST_PART, min(_DAY_S, self.duration_s) / 2)

    def _rate_at(self, at_s: float) -> float:
        if self.pattern == "bursts":
            base = self.rate / (_BURST_PART * _BURST_RATE + 1 - _BURST_PART)
            return base * (_BURST_RATE if at_s % _BURST_PERIOD_S < _BURST_PERIOD_S * _BURST_PART else 1.0)
        if self.pattern == "diurnal":
            # A day, or the whole load where that is shorter, from midnight on.
            day_s = min(_DAY_S, self.duration_s)
            shape = (1 - math.cos(2 * math.pi * at_s / day_s)) / 2
            return self.rate * (_NIGHT + (1 - _NIGHT) * shape) / ((1 + _NIGHT) / 2)
        return self.rate


class Burst(NamedTuple):
    """From `at_s` on, for so many seconds, requests come `factor` times as often."""

    at_s: float
    seconds: float
    factor: float

    def over(self, arrivals: Sequence[ArrivingRequest], seed: int) -> list[ArrivingRequest]:
        """The load with the burst: requests inside it come again, each at a moment drawn in it."""
        rng = random.Random(seed)
        inside = [each for each in arrivals if self.at_s <= each.at_s < self.at_s + self.seconds]
        more = [
            each._replace(at_s=rng.uniform(self.at_s, self.at_s + self.seconds))
            for each in rng.choices(inside, k=round((self.factor - 1) * len(inside)))
        ]
        return sorted([*arrivals, *more], key=lambda each: each.at_s)
