"""Input of batches: an index of lines on the disk, and what is wrong with each of them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from contract.errors import MillraceError
from gateway.batches.lines import BadInput, Fault, LineIndex, check_line, index_lines, name_of, read_line

URL = "/v1/chat/completions"


def line(name: str = "a", **more: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {"x": 1}, **more}).encode()


def indexed(folder: Path, data: bytes, *, max_lines: int = 100, max_line_bytes: int = 1000) -> list[Any]:
    source = folder / "input"
    source.write_bytes(data)
    with source.open("rb") as file:
        num = index_lines(file, folder, URL, max_lines=max_lines, max_line_bytes=max_line_bytes)
    index, found = LineIndex(folder / "index", lambda position: False), []
    while (entry := index.next()) is not None:
        found.append(entry)
    index.close()
    assert len(found) == num
    assert not (folder / "ids").exists()
    return found


def test_lines_are_found_again_where_they_stand(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + line("a") + b"\n\n  \r\n" + line("\u00e9") + b"\r\n" + line("c")
    entries = indexed(tmp_path, data)
    assert [(each.line, each.fault) for each in entries] == [(1, 0), (4, 0), (5, 0)]
    with (tmp_path / "input").open("rb") as source:
        names = [check_line(read_line(source, each), URL).custom_id for each in entries]
    assert names == ["a", "\u00e9", "c"]


def test_each_fault_is_a_lines_own(tmp_path: Path) -> None:
    data = b"\n".join(
        [line("a"), b"{broken", line("a"), line("b" * 2000), line("c", url="/v1/other"), line("d")]
    )
    entries = indexed(tmp_path, data)
    assert [each.fault for each in entries] == [
        Fault.NONE,
        Fault.MALFORMED,
        Fault.DUPLICATE,
        Fault.TOO_LONG,
        Fault.MALFORMED,
        Fault.NONE,
    ]
    assert entries[2].first_line == 1
    with (tmp_path / "input").open("rb") as source:
        assert read_line(source, entries[5]) == line("d")


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        (b"nothing", "", "the line is not JSON"),
        (b"[1]", "", "Expected `object`"),
        (b'{"custom_id": "a"}', "url", "url: it is required"),
        (b'{"custom_id": 7, "url": "u", "body": {}}', "custom_id", "custom_id: Expected `str`, got `int`"),
        (line(""), "custom_id", "use 1 to 256"),
        (line("x" * 257), "custom_id", "use 1 to 256"),
        (line(method="GET"), "method", "is not POST"),
        (line(url="/v1/messages"), "url", "is not the batch's endpoint /v1/chat/completions"),
        (line(body=[]), "body", "no JSON object"),
        (line(body={"stream": True}), "body.stream", "leave it out"),
        (line(body={"background": True}), "body.background", "leave it out"),
    ],
)
def test_what_is_no_request_is_told_by_its_field(data: bytes, field: str, words: str) -> None:
    with pytest.raises(MillraceError) as raised:
        check_line(data, URL)
    assert raised.value.field == field
    assert words in raised.value.message


def test_a_bad_line_names_itself_if_it_can() -> None:
    assert name_of(b'{"custom_id": "a", "url": 3}') == "a"
    assert name_of(b"{") is name_of(b"[]") is name_of(b'{"custom_id": 4}') is None


@pytest.mark.parametrize(
    ("data", "code", "first"),
    [(b"", "empty_file", 1), (b"\n \n", "empty_file", 1), (b"name,age\nanna,3\n", "malformed_body", 1)],
)
def test_what_is_no_jsonl_fails_as_a_whole(tmp_path: Path, data: bytes, code: str, first: int) -> None:
    with pytest.raises(BadInput) as raised:
        indexed(tmp_path, data)
    assert (raised.value.problems[0].code, raised.value.problems[0].line) == (code, first)
    assert f"line {first}" in raised.value.problems[0].message


def test_too_many_lines_are_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as raised:
        indexed(tmp_path, b"\n".join(line(str(each)) for each in range(4)), max_lines=3)
    assert raised.value.problems[0].line == 4
    assert "at most 3" in raised.value.problems[0].message


def test_memory_does_not_grow_with_lines(tmp_path: Path) -> None:
    peaks = []
    for num in (2_000, 20_000):
        data = b"\n".join(line(f"request-{each}") for each in range(num))
        source = tmp_path / "input"
        source.write_bytes(data)
        del data
        tracemalloc.start()
        with source.open("rb") as file:
            index_lines(file, tmp_path, URL, max_lines=10**6, max_line_bytes=1000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, peaks
