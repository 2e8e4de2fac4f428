"""Runs every client of pins.toml against one stack of the bundled model, and one of small models that pool:
`make test-clients`.

`python -m tests.clients [NAME ...] [--environments FOLDER] [--out FOLDER] [--write PAGE] [--torch ARGUMENTS]
[--model NAME --tokenizer FOLDER]`

Exits with 1 when a feature neither works nor is refused by name. With names, only those clients run;
@FILE has one a line. A stage of `.ci/run` is told which clients failed, as pytest's runs tell which tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.supervisor.config import BUNDLED_MODEL
from services.supervisor.ports import free_ports
from tests.clients.environments import Client, Environments, NotInstalled, read_pins
from tests.clients.pooled import pooled_stack
from tests.clients.table import RESULTS, Result, page, read_results
from tests.e2e.stack import LIMIT_S, Stack, eventually, limited_config, running_stack
from tests.stages.report import PATH, tell

_ROOT = Path(__file__).resolve().parents[2]
# Beside what schemathesis is given for each of its two modes.
_PROGRAM_LIMIT_S = 600 + 2 * float(os.environ.get("CLIENTS_SECONDS", "0"))


@dataclass(frozen=True)
class Served:
    """The model that clients ask, as `millrace up --model` takes it, and the folder of its tokenizer and of
    the weights that a client's own oracle reads.
    """

    model: Path
    tokenizer: Path


class Matrix:
    """The clients' programs and what they told."""

    def __init__(
        self, clients: Sequence[Client], environments: Environments, out: Path, served: Served
    ) -> None:
        self._clients, self._environments, self._out, self._served = clients, environments, out, served
        self._variables: dict[str, str] = {}
        self.results: dict[str, list[Result]] = {}

    def run(self) -> None:
        """Makes all environments, then starts the stack and the programs, one after the other."""
        for client in self._clients:
            self._attempt_to_make(client)
        ready = [each for each in self._clients if each.name not in self.results]
        tenants = [f"[tenants.{each.folder_name}]\nrequests_per_minute = 1" for each in ready]
        keys = {each.folder_name: f"mr-{each.folder_name}" for each in ready}
        config = limited_config("", 30, tenants, keys)
        with (
            self._consumer(ready) as telemetry,
            pooled_stack(self._out / "pooled") as pooled,
            running_stack(
                self._out / "stack", config=config, environment=telemetry, model=self._served.model
            ) as stack,
        ):
            self._variables |= {**_variables(stack), "CLIENTS_POOLED": str(pooled)}
            for client in ready:
                self._ask(client, stack)

    def _attempt_to_make(self, client: Client) -> None:
        began_s = time.monotonic()
        try:
            self._environments.make(client)
        except NotInstalled as error:
            self.results[client.name] = [_failed("installation", str(error))]
        print(f"{client.name}: environment after {time.monotonic() - began_s:.0f} s", flush=True)

    def _environment(self, client: Client) -> dict[str, str]:
        folder = self._out / client.folder_name
        folder.mkdir(exist_ok=True)
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")},
            **self._variables,
            "CLIENTS_LIMITED_KEY": f"mr-{client.folder_name}",
            "CLIENTS_ROOT": str(_ROOT),
            "CLIENTS_TOKENIZER": str(self._served.tokenizer),
            "CLIENTS_ENVIRONMENT": str(self._environments.folder(client)),
            "CLIENTS_OUT": str(folder),
            "NO_PROXY": "127.0.0.1,localhost",
            # No client asks a hub for anything.
            "HF_HUB_OFFLINE": "1",
        }

    @contextmanager
    def _consumer(self, clients: Sequence[Client]) -> Iterator[dict[str, str]]:
        """Starts what receives traces, if a client does; gives the stack's variables."""
        client = next((each for each in clients if each.receives_traces), None)
        if client is None:
            yield {}
            return
        http, grpc = free_ports(2, "127.0.0.1")
        self._variables |= dict.fromkeys(_variables(None), "")
        self._variables["CLIENTS_CONSUMER_PORTS"] = f"{http},{grpc}"
        with (self._out / "consumer.log").open("wb") as log:
            process = subprocess.Popen(
                [*self._environments.command(client), "serve"],
                env=self._environment(client),
                stdout=log,
                stderr=log,
            )
            try:
                assert eventually(lambda: _listens(grpc)), (self._out / "consumer.log").read_text()
                yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{grpc}"}
            finally:
                process.terminate()
                process.wait(LIMIT_S)

    def _ask(self, client: Client, stack: Stack) -> None:
        folder, began_s = self._out / client.folder_name, time.monotonic()
        environment = self._environment(client)
        told = folder / RESULTS
        told.unlink(missing_ok=True)
        with (folder / "log.txt").open("wb") as log:
            try:
                status: object = subprocess.run(
                    self._environments.command(client),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    timeout=_PROGRAM_LIMIT_S,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired as error:
                status = error
        results = read_results(folder)
        if status != 0 or not results:
            end = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-3000:]
            results.append(_failed("its program", f"{status}\n{end}"))
        try:
            stack.assert_nothing_leaked()
        except AssertionError as error:
            results.append(_failed("what it leaves in the engines", str(error)))
        told.write_bytes(b"\n".join(map(msgspec.json.encode, results)))
        self.results[client.name] = results
        num_good = sum(each.outcome != "failed" for each in results)
        seconds = time.monotonic() - began_s
        print(f"{client.name}: {num_good} of {len(results)} features after {seconds:.0f} s", flush=True)


def _variables(stack: Stack | None) -> dict[str, str]:
    """What programs are told of the stack."""
    if stack is None:
        return dict.fromkeys(("CLIENTS_BASE_URL", "CLIENTS_API_KEY", "CLIENTS_MODEL", "CLIENTS_ADDRESS"), "")
    pages = {
        each.name: each.addresses["metrics"] for each in stack.state.processes if "metrics" in each.addresses
    }
    return {
        "CLIENTS_BASE_URL": f"{stack.url}/v1",
        "CLIENTS_API_KEY": stack.state.api_key,
        "CLIENTS_MODEL": stack.model,
        "CLIENTS_ADDRESS": stack.address,
        "CLIENTS_METRICS": json.dumps(pages),
    }


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _failed(feature: str, detail: str) -> Result:
    return Result(feature=feature, outcome="failed", detail=detail)


def _report(results: Mapping[str, Sequence[Result]]) -> int:
    """Prints what failed and the closing line; the number of failures."""
    failed = [(name, each) for name, told in results.items() for each in told if each.outcome == "failed"]
    for name, each in failed:
        print(f"\n--- {name}: {each.feature}\n{each.detail}")
    num_all = sum(map(len, results.values()))
    print(f"\n{num_all - len(failed)} passed, {len(failed)} failed")
    return len(failed)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("names", nargs="*", help="clients; all of them if none is named")
    parser.add_argument("--environments", type=Path, default=_ROOT / "build" / "clients")
    parser.add_argument("--out", type=Path, help="for logs and results; those of clients not named are kept")
    parser.add_argument("--write", type=Path, help="write the tables to this page, once all clients have run")
    parser.add_argument("--torch", default="torch", help="arguments with which pip installs torch")
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="what is served")
    parser.add_argument("--tokenizer", type=Path, default=BUNDLED_MODEL, help="its tokenizer and weights")
    arguments = parser.parse_args()
    pins = read_pins()
    unknown = set(arguments.names) - {each.name for each in pins.clients}
    if unknown:
        parser.error(
            f"unknown: {', '.join(unknown)}; known are {', '.join(each.name for each in pins.clients)}"
        )
    clients = [each for each in pins.clients if not arguments.names or each.name in arguments.names]
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="clients-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    environments = Environments(arguments.environments.resolve(), pins, shlex.split(arguments.torch))
    served = Served(arguments.model, arguments.tokenizer.resolve())
    matrix = Matrix(clients, environments, out, served)
    matrix.run()
    failed = [name for name, told in matrix.results.items() if any(each.outcome == "failed" for each in told)]
    if PATH:
        tell(Path(PATH), int(bool(failed)), failed, len(matrix.results) - len(failed))
    # Of the others, what they told in this folder before.
    results = {each.name: read_results(out / each.folder_name) for each in pins.clients} | matrix.results
    tables = page(results, pins.clients)
    print(f"\n{tables}")
    if arguments.write and all(results.values()) and not failed:
        arguments.write.write_text(tables, encoding="utf-8")
    return 1 if _report(matrix.results) else 0


if __name__ == "__main__":
    sys.exit(main())
