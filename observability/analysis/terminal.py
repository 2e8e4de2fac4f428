"""What the commands on traces share: which store they read, where they draw, and one line on failure."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from observability.analysis.decode import StoredSpan
from observability.analysis.jaeger import JaegerReader
from observability.analysis.source import SpanSource, StoreError
from observability.analysis.store import SpanReader
from observability.emit import names
from observability.emit.config import ObservabilityConfig

_SIZE_WHEN_PIPED = (140, 40)
# Services send their spans every few seconds; a trace whose newest span ended longer ago than the latter gets
# no more of them.
_WAIT_S = 15.0
_YOUNG_NS = 5_000_000_000
_PAUSE_S = 0.1

Answer = Callable[[SpanSource, argparse.Namespace], RenderableType]


def console_width() -> int:
    """Columns to draw for: the terminal's, COLUMNS, or a page's width when the output is piped."""
    return shutil.get_terminal_size(_SIZE_WHEN_PIPED).columns


def table(*titles: str, num_left: int = 1) -> Table:
    """With columns of texts, and then of numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        # Where there is little space, titles have two lines, and names stay whole.
        is_left = index < num_left
        made.add_column(title, justify="left" if is_left else "right", no_wrap=is_left)
    return made


def _wait_whole(reader: SpanSource, request_id: str) -> None:
    """Returns when the trace of a request that has ended is there, or when it does not come."""

    def spans() -> list[StoredSpan]:
        return [span for each in reader.traces_of_request(request_id) for span in reader.trace(each)]

    deadline_s = time.monotonic() + _WAIT_S
    while not _is_whole(spans()) and time.monotonic() < deadline_s:
        time.sleep(_PAUSE_S)


def _wait_last(reader: SpanSource) -> str:
    """The id of the newest request's trace, once all of it is there or the rest no longer comes; "" when
    there is none. It is that trace's whatever is asked meanwhile.
    """
    trace_id = reader.last_trace()
    deadline_s = time.monotonic() + _WAIT_S
    while trace_id and time.monotonic() < deadline_s:
        spans = reader.trace(trace_id)
        newest_ns = max((span.end_ns for span in spans), default=0)
        if _is_whole(spans) or time.time_ns() - newest_ns > _YOUNG_NS:
            break
        time.sleep(_PAUSE_S)
    return trace_id


def _is_whole(spans: Sequence[StoredSpan]) -> bool:
    """Whether every service has recorded its part of a request: each sends its spans by itself."""
    asked = next((span for span in spans if span.name == names.GATEWAY_REQUEST), None)
    if asked is None or all(span.name != names.ENVOY_INGRESS for span in spans):
        return False
    # One that was refused never came to an engine.
    return names.TTFT_MS not in asked.attributes or any(span.service == names.ENGINE for span in spans)


def takes_a_request(parser: argparse.ArgumentParser) -> None:
    """Options of commands that show one request."""
    parser.add_argument(
        "what", nargs="?", default="last", help="request id, ours or the client's; trace id; 'last'"
    )
    parser.add_argument("--after", default="", metavar="ID", help="have `last` wait for this request's trace")


def run(parser: argparse.ArgumentParser, answer: Answer, arguments: Sequence[str] | None) -> int:
    """Prints what `answer` says of the store: 0, or 1 with one clear line when there is nothing to say."""
    parser.add_argument("--store", type=Path, default=Path(ObservabilityConfig().store))
    parser.add_argument(
        "--jaeger", default="", metavar="URL", help="ask a deployment's Jaeger, as http://127.0.0.1:16686"
    )
    parsed = parser.parse_args(arguments)
    try:
        reader: SpanSource = JaegerReader(parsed.jaeger) if parsed.jaeger else SpanReader(parsed.store)
        try:
            if getattr(parsed, "what", "") == "last":
                if parsed.after:
                    _wait_whole(reader, parsed.after)
                # Other clients may have sent requests since.
                parsed.what = _wait_last(reader) or parsed.what
            found = answer(reader, parsed)
        finally:
            reader.close()
        Console(width=console_width(), highlight=False).print(found)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
