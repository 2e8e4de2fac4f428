"""`millrace batch`: runs a file of requests against a server, without a client, and goes on where it was."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from runtime.errors import ConfigError, described
from services.cli.target import ServerTarget, find_target

app = typer.Typer(help="Files of requests that run in what capacity is left.", no_args_is_help=True)

_notes = Console(stderr=True, highlight=False)
_POLL_S = 1.0
# How long a server that does not answer is waited for: a gateway is started again meanwhile.
_PATIENCE_S = 120.0
# Where the endpoint is looked for: in so many lines, of each of which so much is read.
_LINES_READ, _LINE_BYTES = 100, 16 << 20
# Of those that have not come to their last line, why.
_CUT_SHORT = {"expired": "its window of {window} ended", "cancelled": "it was cancelled"}
_ENDED = ("completed", "failed", *_CUT_SHORT)


class BatchFailed(Exception):
    """The server refused, or does not answer; the message is for people."""


class BatchGone(BatchFailed):
    """The server has no such batch, or no such file, any more."""


class RunningBatch(msgspec.Struct, frozen=True):
    """What is put down beside the input, so that the same command goes on."""

    url: str
    batch_id: str
    input_file_id: str
    num_bytes: int
    modified_ns: int


class BatchClient:
    """A blocking client of files and batches. A server that is away for a while is waited for."""

    def __init__(self, target: ServerTarget) -> None:
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        timeout = httpx.Timeout(60.0, read=None)
        self._http = httpx.Client(base_url=target.url, headers=headers, timeout=timeout)

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The answer; raises BatchFailed. What changes nothing is asked again while the server is away."""
        until_s = time.monotonic() + (_PATIENCE_S if method == "GET" else 0.0)
        while True:
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError as error:
                problem = f"{self._http.base_url}: {error}"
                is_away = True
            else:
                is_away = answer.status_code in (502, 503)
                problem = _refusal(answer) if answer.is_error else ""
            if not problem:
                found: dict[str, Any] = answer.json()
                return found
            if not is_away and answer.status_code == 404:
                raise BatchGone(problem)
            if not is_away or time.monotonic() >= until_s:
                raise BatchFailed(problem)
            time.sleep(_POLL_S)

    def upload(self, path: Path) -> str:
        """The id of the file."""
        with path.open("rb") as file:
            sent = {"file": (path.name, file, "application/jsonl")}
            return str(self.ask("POST", "/v1/files", files=sent, data={"purpose": "batch"})["id"])

    def download(self, file_id: str, path: Path) -> None:
        """Writes a file's bytes; it is there when it is whole."""
        part = path.with_name(f"{path.name}.part")
        try:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
                if answer.is_error:
                    answer.read()
                    raise (BatchGone if answer.status_code == 404 else BatchFailed)(_refusal(answer))
                with part.open("wb") as file:
                    for piece in answer.iter_bytes():
                        file.write(piece)
            part.replace(path)
        except httpx.TransportError as error:
            raise BatchFailed(f"{self._http.base_url}: {error}; the same command goes on") from error
        finally:
            part.unlink(missing_ok=True)


def _refusal(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answered {answer.status_code}"


@app.command()
def run(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Requests, a JSON object a line.")
    ],
    output: Annotated[Path | None, typer.Option(help="Answers; FILE.output.jsonl when not given.")] = None,
    errors: Annotated[
        Path | None, typer.Option(help="Lines without an answer; FILE.errors.jsonl when not given.")
    ] = None,
    endpoint: Annotated[str, typer.Option(help="As /v1/responses; that of the first line when empty.")] = "",
    window: Annotated[str, typer.Option(help="Time for all of it, in minutes, hours or days.")] = "24h",
    url: Annotated[str, typer.Option(help="Server as host:port; the local stack when empty.")] = "",
) -> None:
    """Run a file of requests to its end and fetch the answers. Interrupted, the same command goes on.

    Ends with 0 when every line has an answer, 1 when some have none, 2 when nothing could be run, 3 when the
    batch expired or was cancelled: what was answered until then is written, and the other lines as errors.
    """
    try:
        target = find_target(url)
        with BatchClient(target) as client:
            batch = _follow(client, _started(client, target, file, endpoint, window), file)
            _fetch(client, batch, file, output, errors)
    except (BatchFailed, ConfigError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(described(error))
    except KeyboardInterrupt:
        _notes.print("the batch goes on; the same command follows it again", markup=False)
        raise typer.Exit(130) from None
    if batch["status"] in _CUT_SHORT:
        raise typer.Exit(3)
    raise typer.Exit(0 if batch["status"] == "completed" and not batch["request_counts"]["failed"] else 1)


def _fail(problem: str) -> NoReturn:
    _notes.print(f"millrace: {problem}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(2)


def _note_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.batch")


def _started(client: BatchClient, target: ServerTarget, file: Path, endpoint: str, window: str) -> str:
    """The batch that runs this file: the one that was begun, or a new one."""
    note, status = _note_of(file), file.stat()
    if note.exists():
        try:
            running = msgspec.json.decode(note.read_bytes(), type=RunningBatch)
        except msgspec.MsgspecError as error:
            raise BatchFailed(f"{note} cannot be read ({error}); delete it to begin anew") from error
        if (running.num_bytes, running.modified_ns) != (status.st_size, status.st_mtime_ns):
            raise BatchFailed(
                f"{file} was changed after {running.batch_id} was begun with it; delete {note} to begin anew"
            )
        if running.url != target.url:
            raise BatchFailed(f"{running.batch_id} runs at {running.url}: name it, or delete {note}")
        return running.batch_id
    endpoint = endpoint or _endpoint_of(file)
    file_id = client.upload(file)
    asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
    batch_id = str(client.ask("POST", "/v1/batches", json=asked)["id"])
    running = RunningBatch(target.url, batch_id, file_id, status.st_size, status.st_mtime_ns)
    note.write_bytes(msgspec.json.encode(running))
    return batch_id


def _endpoint_of(file: Path) -> str:
    """That of the first line that names one: a bad line is the batch's to tell of."""
    with file.open("rb") as lines:
        for line in islice(iter(partial(lines.readline, _LINE_BYTES), b""), _LINES_READ):
            with suppress(ValueError, KeyError, TypeError):
                return str(json.loads(line)["url"])
    raise BatchFailed(
        f"{file}: none of its first {_LINES_READ} lines is a JSON object with a url; write one object a "
        "line, or name the endpoint with --endpoint"
    )


def _follow(client: BatchClient, batch_id: str, file: Path) -> dict[str, Any]:
    """Shows how far it is until it has ended; what it is then."""
    told = ""
    with _bar() as progress:
        task = progress.add_task("validating", total=None)
        while True:
            try:
                batch = client.ask("GET", f"/v1/batches/{batch_id}")
            except BatchGone as error:
                raise BatchFailed(f"{error}; delete {_note_of(file)} to begin anew") from error
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            total = counts["total"] or None
            progress.update(task, description=batch["status"], total=total, completed=done)
            detail = batch.get("status_detail") or ""
            if detail != told:
                told = detail
                _notes.print(detail or "it goes on", markup=False, soft_wrap=True)
            if batch["status"] in _ENDED:
                return batch
            time.sleep(_POLL_S)


@contextmanager
def _bar() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_notes, disable=not sys.stderr.isatty()) as progress:
        yield progress


def _fetch(
    client: BatchClient, batch: dict[str, Any], file: Path, output: Path | None, errors: Path | None
) -> None:
    """Writes the results, and says what became of the lines; raises BatchFailed where a file is gone."""
    gone = []
    for id_, asked, name in (
        (batch["output_file_id"], output, "output"),
        (batch["error_file_id"], errors, "errors"),
    ):
        if id_:
            path = asked or file.with_name(f"{file.name}.{name}.jsonl")
            try:
                client.download(id_, path)
            except BatchGone as error:
                gone.append(f"{name}: {error}")
            else:
                _notes.print(f"{name}: {path}", markup=False, soft_wrap=True)
    for problem in (batch["errors"] or {}).get("data", ()):
        _notes.print(problem["message"], style="red", markup=False, soft_wrap=True)
    _notes.print(_told(batch), markup=False, soft_wrap=True)
    # Nothing more will come of it: the same command begins anew.
    _note_of(file).unlink(missing_ok=True)
    if gone:
        raise BatchFailed(f"{'; '.join(gone)}; the same command runs the file anew")


def _told(batch: dict[str, Any]) -> str:
    counts, status = batch["request_counts"], batch["status"]
    told = f"{status}: {counts['completed']} of {counts['total']} lines have answers"
    if status not in _CUT_SHORT:
        return told
    why = _CUT_SHORT[status].format(window=batch["completion_window"])
    if not counts["total"]:
        return f"{status}: {why} before its lines were read, so none has an answer; run the file again"
    # Where something kept them from being written, that was said.
    among = "" if batch["errors"] else ", which are among the errors"
    return f"{told}; {why} before the others did{among}: run those lines again"
