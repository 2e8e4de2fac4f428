"""`millrace gate` between servers over real sockets: verdicts, exit status, reports, and what is kept."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.gate import client, run
from tests.unit.services.gate.toy import Spoiled, ToyServer, serving

ALL = "[tokens]\n[intrinsic]\n[task]\n[structure]\n[long_context]\n[behaviour]\n"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compares two servers by a suite; what the command printed and wrote."""
    monkeypatch.setattr(client, "_PAUSE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    with ExitStack() as servers:

        def compare(baseline: ToyServer, candidate: ToyServer, suite: str = ALL, *more: str) -> Any:
            for number, each in enumerate((baseline, candidate)):
                each.number = number
                if not each.url:
                    servers.enter_context(serving(each))
            (tmp_path / "suite.toml").write_text(suite)
            arguments = ["gate", "--baseline", baseline.url, "--candidate", candidate.url]
            files = [
                "--suite",
                "suite.toml",
                "--json",
                "out.json",
                "--junit",
                "out.xml",
                "--html",
                "out.html",
            ]
            return CliRunner().invoke(app, [*arguments, *files, *more])

        yield compare


def layers(tmp_path: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((tmp_path / "out.json").read_text())
    return {each["layer"]: each for each in found["layers"]}


def test_identical_deployments_are_not_worse(gate: Any, tmp_path: Path) -> None:
    baseline, candidate = ToyServer(), ToyServer()
    result = gate(baseline, candidate)
    assert result.exit_code == 0, result.output
    assert {each["verdict"] for each in layers(tmp_path).values()} == {"not worse"}
    assert len(layers(tmp_path)) == 6
    # Decided early: not all cases of each layer were asked.
    assert len(candidate.asked) < 600


def test_the_default_suite_needs_no_file(gate: Any, tmp_path: Path) -> None:
    with serving(ToyServer()) as server:
        result = CliRunner().invoke(
            app, ["gate", "--baseline", server.url, "--candidate", f"{server.url}#toy"]
        )
    assert result.exit_code == 0, result.output
    assert "not worse" in result.output


@pytest.mark.parametrize(
    ("spoiled", "layer"),
    [
        (Spoiled(weight_steps=2.0), "intrinsic"),
        (Spoiled(temperature=1.1), "tokens"),
        (Spoiled(template="<|user|>"), "tokens"),
        (Spoiled(ignores_schemas=True), "structure"),
        (Spoiled(loses_middle=True), "long_context"),
    ],
)
def test_what_is_broken_is_worse_in_its_layer(
    gate: Any, tmp_path: Path, spoiled: Spoiled, layer: str
) -> None:
    result = gate(ToyServer(), ToyServer(spoiled=spoiled), f"[{layer}]\n")
    assert result.exit_code == 1, result.output
    assert layers(tmp_path)[layer]["verdict"] == "worse"
    assert "worse" in result.output


KEPT = "[intrinsic]\ncases = 40\n[long_context]\n"


def test_what_the_candidate_forgets_is_judged(gate: Any, tmp_path: Path) -> None:
    """The same server twice, of which one side's requests say what their answers forget."""
    baseline, candidate = ToyServer(), ToyServer()
    assert gate(baseline, candidate, KEPT, "--kv", "snapkv:0.5").exit_code == 1
    assert {name: each["verdict"] for name, each in layers(tmp_path).items()} == {
        "intrinsic": "worse",
        "long_context": "worse",
    }
    asked = [each["kv"] for each in candidate.asked if "kv" in each]
    assert all(each == {"policy": "snapkv", "keep": 0.5} for each in asked)
    assert len(asked) >= 40
    assert not any("kv" in each for each in baseline.asked)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["candidate"]["kv"] == asked[0]
    assert "toy with snapkv:0.5 at" in (tmp_path / "out.html").read_text()
    # Texts are given to both alike, and continued: a prompt is computed before anything is forgotten.
    continued = [each for each in baseline.asked if "guided_choice" in each]
    for each in continued:
        (rest,) = each["guided_choice"]
        assert len(each["prompt"]) > 2 * len(rest) > 1000
        assert "echo" not in each
    assert continued


@pytest.mark.parametrize(
    ("kv", "problem"),
    [
        ("snapkv", "--kv 'snapkv': give POLICY:KEEP, as in snapkv:0.5 or snapkv:512"),
        ("snapkv:1.5", "give POLICY:KEEP"),
        ("snapkv:0", "--kv.keep: 0.0 is not above 0 and at most 1"),
        ("half:0.5", "--kv.policy: 'half' is not one of full"),
        ("full:0.5", "--kv.keep: policy full keeps everything"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_told(gate: Any, kv: str, problem: str) -> None:
    server = ToyServer()
    result = gate(server, ToyServer(), KEPT, "--kv", kv)
    assert result.exit_code == 2
    assert problem in " ".join(result.output.split())
    assert not server.asked


def test_needles_lost_in_the_middle_show_in_the_heat_map(gate: Any, tmp_path: Path) -> None:
    result = gate(
        ToyServer(),
        ToyServer(spoiled=Spoiled(loses_middle=True)),
        "[long_context]\n",
        *("--all-cases", "--png", "out.png"),
    )
    cells = layers(tmp_path)["long_context"]["cells"]
    by_depth = {
        depth: [cell["candidate"] for cell in cells if cell["depth"] == depth] for depth in (0.0, 0.5, 1.0)
    }
    assert (by_depth[0.0], by_depth[1.0]) == ([1.0] * 3, [1.0] * 3)
    assert max(by_depth[0.5]) < 0.4
    assert "50%" in result.output
    assert "<svg" in (tmp_path / "out.html").read_text()
    rows = _pixels((tmp_path / "out.png").read_bytes())
    lengths, depths = (sorted({cell[name] for cell in cells}) for name in ("length", "depth"))
    for cell in cells:
        # In its upper left corner: green where most are found, and red where most are lost.
        x, y = 68 + 96 * lengths.index(cell["length"]), 36 + 48 * depths.index(cell["depth"])
        red, green, _ = rows[y][x]
        assert (green > red) == (cell["candidate"] > 0.5), cell


def _pixels(png: bytes) -> list[list[tuple[int, int, int]]]:
    """Rows of a PNG as this one is: three channels of 8 bits, unfiltered. Its sums must be right."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4])
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert int.from_bytes(png[at + 8 + length : at + 12 + length]) == zlib.crc32(name + data)
        chunks[name], at = data, at + 12 + length
    width, height = int.from_bytes(chunks[b"IHDR"][:4]), int.from_bytes(chunks[b"IHDR"][4:8])
    assert chunks[b"IHDR"][8:] == bytes((8, 2, 0, 0, 0))
    raw, stride = zlib.decompress(chunks[b"IDAT"]), 1 + 3 * width
    assert len(raw) == height * stride
    lines = [raw[stride * row + 1 : stride * (row + 1)] for row in range(height)]
    assert {raw[stride * row] for row in range(height)} == {0}
    return [[(line[x], line[x + 1], line[x + 2]) for x in range(0, 3 * width, 3)] for line in lines]


def test_a_heat_map_of_no_needles_is_refused_before_anything_is_asked(gate: Any) -> None:
    server = ToyServer()
    result = gate(server, ToyServer(), "[structure]\n", "--png", "out.png")
    assert result.exit_code == 2
    assert "--png: the suite has no needles to draw; add [long_context]" in " ".join(result.output.split())
    assert not server.asked


def test_where_seeds_are_not_kept_equal_servers_are_not_worse(gate: Any, tmp_path: Path) -> None:
    suite = "[tokens]\ndelta = 0.2\ncases = 300\n"
    result = gate(ToyServer(keeps_seeds=False), ToyServer(keeps_seeds=False), suite)
    assert result.exit_code == 0, result.output
    assert "equal seeds" in layers(tmp_path)["tokens"]["note"]


def test_too_few_cases_say_how_many_more(gate: Any, tmp_path: Path) -> None:
    result = gate(ToyServer(), ToyServer(), "[task]\ncases = 20\n")
    assert result.exit_code == 3, result.output
    more = layers(tmp_path)["task"]["more_needed"]
    assert f"about {more} more" in result.output
    assert gate(ToyServer(), ToyServer(), f"[task]\ncases = {20 + more}\n").exit_code == 0


def test_a_layer_that_does_not_decide_is_told(gate: Any, tmp_path: Path) -> None:
    suite = "[task]\n[tokens]\ndecides = false\n"
    result = gate(ToyServer(), ToyServer(spoiled=Spoiled(temperature=1.5)), suite)
    assert result.exit_code == 0, result.output
    assert layers(tmp_path)["tokens"]["verdict"] == "worse"
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")}
    assert cases["tokens"].find("skipped") is not None


# --- what cannot be compared ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "named"),
    [
        (ToyServer(splits_otherwise=True), "tokenizers of toy and toy differ"),
        (ToyServer(has_echo=False), "leave out [intrinsic]"),
        (ToyServer(dies_after=0), "does not answer"),
    ],
)
def test_what_cannot_be_compared_gets_no_verdict(
    gate: Any, tmp_path: Path, candidate: ToyServer, named: str
) -> None:
    result = gate(ToyServer(), candidate)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())
    assert not (tmp_path / "out.json").exists()


def test_a_suite_that_is_wrong_gets_no_verdict(gate: Any, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hi", "check": "exact"}\n')
    baseline = ToyServer()
    result = gate(baseline, ToyServer(), "[task]\nfile = 'tasks.jsonl'\n")
    assert result.exit_code == 2
    assert "tasks.jsonl:1: the case has no answer" in " ".join(result.output.split())
    # A checkpoint would have been served for nothing.
    assert not baseline.asked
    result = gate(baseline, ToyServer(), "[task]\nextra = 1\n")
    assert (result.exit_code, "extra" in result.output) == (2, True)


def test_an_unknown_model_is_named(gate: Any, tmp_path: Path) -> None:
    with serving(ToyServer()) as server:
        arguments = ["gate", "--baseline", server.url, "--candidate", f"{server.url}#other"]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "has no model 'other'; it has toy" in " ".join(result.output.split())


def test_what_nobody_foresaw_is_no_verdict(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "judge_layer", fail)
    assert gate(ToyServer(), ToyServer(), "[task]\n").exit_code == 2


@pytest.mark.parametrize(("more", "sent"), [((), None), (("--judge-key", "another"), "Bearer another")])
def test_a_judge_elsewhere_never_learns_the_baselines_key(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], sent: str | None
) -> None:
    monkeypatch.setenv("MILLRACE_API_KEY", "a secret")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hi", "check": "judge", "answer": "hello"}\n')
    baseline = ToyServer()
    with serving(ToyServer()) as judge:
        gate(baseline, ToyServer(), f"[task]\nfile = 'tasks.jsonl'\njudge = '{judge.url}#toy'\n", *more)
        assert judge.keys == {sent}
    assert baseline.keys == {"Bearer a secret"}


# --- what is kept -----------------------------------------------------------------------------------------


def _chats(server: ToyServer) -> int:
    """Requests of cases: those that identify a server are few."""
    return sum("number" in str(body) or "What is" in str(body) for body in server.asked)


def test_a_baseline_is_asked_once(gate: Any, tmp_path: Path) -> None:
    baseline, candidate = ToyServer(), ToyServer()
    for _ in range(2):
        assert gate(baseline, candidate, "[long_context]\n").exit_code == 0
    assert _chats(candidate) == 2 * _chats(baseline)
    assert gate(baseline, candidate, "[long_context]\n", "--fresh").exit_code == 0
    assert 2 * _chats(candidate) == 3 * _chats(baseline)
    assert not list(tmp_path.glob(".millrace/gate/*candidate*"))


def test_an_interrupted_run_goes_on(gate: Any, tmp_path: Path) -> None:
    baseline, candidate = ToyServer(), ToyServer(dies_after=60)
    result = gate(baseline, candidate, "[long_context]\n")
    assert result.exit_code == 2
    assert "does not answer" in result.output
    done = _chats(candidate)
    assert done > 20
    # As a crash leaves it: the last line is cut.
    (kept,) = tmp_path.glob(".millrace/gate/*candidate*")
    kept.write_bytes(kept.read_bytes()[:-20])
    candidate.dies_after = 10**9
    assert gate(baseline, candidate, "[long_context]\n").exit_code == 0
    whole = ToyServer()
    assert gate(ToyServer(), whole, "[long_context]\n").exit_code == 0
    # One is asked twice for the cut, and up to eight that were on their way.
    assert 0 < _chats(candidate) - _chats(whole) <= 9


# --- reports ----------------------------------------------------------------------------------------------


def test_reports(gate: Any, tmp_path: Path) -> None:
    gate(ToyServer(), ToyServer(spoiled=Spoiled(ignores_schemas=True)), "[task]\n[structure]\n")
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    page = (tmp_path / "out.html").read_text()
    assert "http" not in page.replace(
        json.loads((tmp_path / "out.json").read_text())["baseline"]["url"], ""
    ).replace(json.loads((tmp_path / "out.json").read_text())["candidate"]["url"], "").replace(
        "http-equiv", ""
    )
    # What the model wrote is text.
    assert "Here you are: { it is }" in page
    _Balanced().feed(page)


class _Balanced(HTMLParser):
    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "link", "img", "iframe")


def test_a_report_without_a_place_is_refused_before_anything_is_asked(gate: Any) -> None:
    baseline = ToyServer()
    result = gate(baseline, ToyServer(), "[task]\n", "--json", "no/such/out.json")
    assert result.exit_code == 2
    assert "no/such/out.json" in " ".join(result.output.split())
    assert baseline.asked == []
