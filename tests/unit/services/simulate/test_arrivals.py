"""Loads: traces in two public forms, what is wrong with one by its line, and loads that are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import ConfigError
from services.bench.workload import Lengths
from services.simulate.arrivals import ArrivingRequest, Burst, GeneratedLoad, PromptMaker, read_trace
from tests.unit.services.simulate.deployment import load

TIERS = ("batch", "gold")
MOONCAKE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _read(folder: Path, text: str) -> list[ArrivingRequest]:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return read_trace(path, TIERS)


def test_mooncakes_form(tmp_path: Path) -> None:
    second = '{"timestamp": 27000, "input_length": 9, "output_length": 1, "tenant": "a", "tier": "gold"}'
    arrivals = _read(tmp_path, MOONCAKE + "\n" + second)
    assert arrivals[1].at_s == pytest.approx(0.482)
    first = ArrivingRequest(0.0, 9, 1, "a", "gold")
    assert arrivals == [first, ArrivingRequest(arrivals[1].at_s, 6955, 52, hash_ids=(46, 47))]


def test_azures_form(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0798600,3180,8\n"
    arrivals = _read(tmp_path, AZURE + rows)
    assert arrivals[1].at_s == pytest.approx(0.0999)
    assert arrivals == [ArrivingRequest(0.0, 4808, 10), ArrivingRequest(arrivals[1].at_s, 3180, 8)]
    seconds = _read(tmp_path, AZURE.replace("\n", ",tier\n") + "1.5,10,2,batch\n0.5,11,3,\n")
    assert seconds == [ArrivingRequest(0.0, 11, 3), ArrivingRequest(1.0, 10, 2, tier="batch")]


LENGTHS = '"input_length": 5, "output_length": 5'
WRONG = {
    "": "no request",
    AZURE: "a heading and no request",
    MOONCAKE + '{"timestamp": 1, "output_length": 5}': "line 2: no field input_length",
    MOONCAKE + '{"timestamp": -1, "input_length": 5, "output_length": 5}': "line 2: timestamp: -1 is before",
    MOONCAKE + '{"timestamp": "x", "input_length": 5, "output_length": 5}': "line 2: timestamp: 'x' is not a",
    MOONCAKE + '{"timestamp": 1, "input_length": 0, "output_length": 5}': "line 2: input_length: 0 tokens",
    MOONCAKE + '{"timestamp": 1, "input_length": 1.5, "output_length": 5}': "input_length: 1.5 is not",
    MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 5}': "line 2: input_length: True",
    MOONCAKE + '{"timestamp": 1, ' + LENGTHS + ', "tier": "x"}': "no [tiers.x]; known: batch",
    MOONCAKE + '{"timestamp": 1, ' + LENGTHS + ', "tier": 3}': "line 2: tier: 3 is not a",
    MOONCAKE + '{"timestamp": 1, ' + LENGTHS + ', "hash_ids": [-1]}': "line 2: hash_ids:",
    MOONCAKE + "[1, 2]": "line 2: expected an object",
    MOONCAKE + "nonsense": "line 2: not JSON",
    "TIMESTAMP,ContextTokens\n1,2\n": "line 1: no column GeneratedTokens",
    AZURE + "1,2\n": "line 2: 2 fields, the heading has 3",
    AZURE + "yesterday,2,3\n": "line 2: TIMESTAMP: 'yesterday' is neither",
    AZURE + "-5,2,3\n": "line 2: TIMESTAMP: -5.0 is before",
    AZURE + "1,2,3\n2,many,3\n": "line 3: ContextTokens: 'many' is not",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, text)
    assert WRONG[text] in str(refused.value)
    assert str(tmp_path / "trace") in str(refused.value)


def test_prompts_share_what_their_hash_ids_share() -> None:
    maker = PromptMaker()
    first = maker.ids(ArrivingRequest(0, 1500, 1, hash_ids=(5, 6, 7)), 1)
    second = maker.ids(ArrivingRequest(0, 1400, 1, hash_ids=(5, 6, 8)), 2)
    assert (len(first), len(second)) == (1500, 1400)
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]
    # Longer than their hash ids say, and without any: nothing in common with anybody.
    firsts = {maker.ids(ArrivingRequest(0, 200_000, 1), number)[0] for number in range(100)}
    assert len(firsts) == 100


@pytest.mark.parametrize("pattern", ["poisson", "bursts", "diurnal"])
def test_drawn_loads_have_their_rate_and_their_shape(pattern: str) -> None:
    drawn = GeneratedLoad(
        pattern=pattern,  # type: ignore[arg-type]
        rate=10.0,
        duration_s=1200.0,
        input_tokens=Lengths.parse("8"),
        output_tokens=Lengths.parse("8"),
        num_tenants=2,
        tiers={"gold": 3.0, "batch": 1.0},
    )
    arrivals = drawn.arrivals(5)
    assert arrivals == drawn.arrivals(5) != drawn.arrivals(6)
    assert len(arrivals) == pytest.approx(12_000, rel=0.05)
    assert sum(each.tier == "gold" for each in arrivals) == pytest.approx(9000, rel=0.06)
    middle = sum(450 <= each.at_s < 750 for each in arrivals) / len(arrivals)
    in_bursts = sum(each.at_s % 60 < 6 for each in arrivals) / len(arrivals)
    expected = {"poisson": (0.25, 0.1), "bursts": (0.25, 5 / 14), "diurnal": (0.4, 0.1)}[pattern]
    assert (middle, in_bursts) == pytest.approx(expected, abs=0.03)


def test_a_burst_multiplies_what_comes_in_it() -> None:
    arrivals = load(20.0, 30.0).arrivals(0)
    more = Burst(10.0, 5.0, 3.0).over(arrivals, 0)
    inside = [each for each in arrivals if 10 <= each.at_s < 15]
    assert len(more) - len(arrivals) == 2 * len(inside)
    assert sum(10 <= each.at_s < 15 for each in more) == 3 * len(inside)
    assert [each.at_s for each in more] == sorted(each.at_s for each in more)
