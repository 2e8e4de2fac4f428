"""Starts the real stack the way a user does, and looks into it from outside."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import psutil
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from observability.analysis.decode import StoredSpan
from observability.analysis.scrape import Reading, parse
from observability.analysis.source import StoreError
from observability.analysis.store import SpanReader
from observability.emit.names import ENGINES_UP, ENVOY
from runtime.resources import cpuinfo
from services.supervisor.config import BUNDLED_MODEL
from services.supervisor.process import die_with_parent
from services.supervisor.state import RunState, read_state

START_LIMIT_S = 180.0
# Longest time that anything which must happen may take; it does not slow a test that passes.
LIMIT_S = 60.0

# Each in one minute used by one test: what one counts would be refused to another.
LIMITED_KEY = "mr-limited"
LIMITED_GRPC_KEY = "mr-limited-grpc"
CONCURRENT_KEY = "mr-concurrent"
RESTRICTED_KEY = "mr-restricted"


def _hash(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


CONFIG = f"""
[gateway]
default_tier = "standard"

[tiers.interactive]
openai_name = "priority"
priority = 20
[tiers.standard]
openai_name = "default"
priority = 10
[tiers.batch]
openai_name = "flex"
priority = 0

[tenants.development]
tier = "standard"
allowed_tiers = ["interactive", "batch"]

[tenants.limited]
requests_per_minute = 2
[tenants.limited-grpc]
requests_per_minute = 2
[tenants.concurrent]
max_concurrent_streams = 1
[tenants.restricted]
allowed_models = ["another-model"]

[[keys.entries]]
id = "limited-1"
tenant = "limited"
hash = "{_hash(LIMITED_KEY)}"
[[keys.entries]]
id = "limited-grpc-1"
tenant = "limited-grpc"
hash = "{_hash(LIMITED_GRPC_KEY)}"
[[keys.entries]]
id = "concurrent-1"
tenant = "concurrent"
hash = "{_hash(CONCURRENT_KEY)}"
[[keys.entries]]
id = "restricted-1"
tenant = "restricted"
hash = "{_hash(RESTRICTED_KEY)}"
"""


def _vllm_dtype() -> dict[str, str]:
    """What vLLM computes in: its bfloat16 does not become ready where an x86 processor has no AVX-512."""
    features = cpuinfo("flags")
    is_without = bool(features) and "avx512f" not in features[0].split()
    return {"MILLRACE_ENGINE__DTYPE": "float32"} if is_without else {}


# Whose core serves the stacks that have a model: "vllm", or ours; and the interpreter that has vLLM, where it
# is not the one that `millrace engine install vllm` made.
MAKE = os.environ.get("E2E_MAKE", "")
VLLM_PYTHON = os.environ.get("E2E_VLLM_PYTHON", "")
VLLM_SETTINGS = {
    "MILLRACE_ENGINE__VLLM__PYTHON": VLLM_PYTHON,
    "MILLRACE_ENGINE__VLLM__EAGER": "true",
    "MILLRACE_ENGINE__VLLM__BLOCK_SIZE": "32",
    "MILLRACE_ENGINE__CACHE__KV_CACHE_BYTES": str(1 << 29),
    **_vllm_dtype(),
}
_MAKES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "": ((), {}),
    "vllm": (("--engine", "vllm"), VLLM_SETTINGS),
}


def has_bundled_weights() -> bool:
    """Whether the model in this repository can be served; otherwise engines are simulated."""
    return any(BUNDLED_MODEL.glob("*.safetensors"))


@dataclass
class Stack:
    """A stack in its own process, with its own state directory."""

    process: subprocess.Popen[bytes]
    directory: Path
    output: Path

    @property
    def state(self) -> RunState:
        """What runs now."""
        state = read_state(self.directory)
        assert state is not None, self.transcript()
        return state

    @property
    def address(self) -> str:
        return self.state.address

    @property
    def url(self) -> str:
        return f"http://{self.state.address}"

    @property
    def model(self) -> str:
        return self.state.model

    def addresses(self, kind: str, purpose: str) -> list[str]:
        """Addresses of all processes of one kind, for example ("engine", "grpc")."""
        return [each.addresses[purpose] for each in self.state.processes if each.name.startswith(kind)]

    def pid(self, name: str) -> int:
        """Process id of one process."""
        return next(each.pid for each in self.state.processes if each.name == name)

    def all_processes(self) -> list[psutil.Process]:
        """The supervisor and everything below it."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def metrics(self, kind: str) -> list[Reading]:
        """What each process of one kind says about itself."""
        pages = [
            httpx.get(f"http://{address}/metrics", timeout=LIMIT_S, trust_env=False).text
            for address in self.addresses(kind, "metrics")
        ]
        return [parse(page, time.monotonic()) for page in pages]

    def num_attached(self) -> float:
        """Engines that gateways can send work to."""
        return sum(reading.value(ENGINES_UP) for reading in self.metrics("gateway"))

    def openai(self, key: str | None = None) -> openai.OpenAI:
        """The SDK, without its own retries."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.state.api_key, max_retries=0, timeout=LIMIT_S
        )

    def channel(self) -> grpc.Channel:
        """A blocking gRPC channel to the edge."""
        return grpc.insecure_channel(self.address)

    def metadata(self, key: str | None = None) -> tuple[tuple[str, str], ...]:
        """Credentials for gRPC."""
        return (("authorization", f"Bearer {key or self.state.api_key}"),)

    def transcript(self) -> str:
        """What the supervisor and its processes wrote, for messages of failed assertions."""
        logs = sorted((self.directory / "logs").glob("*.log"))
        tails = [f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs]
        return "\n".join([self.output.read_text(errors="replace"), *tails])

    def command(self, *arguments: str) -> str:
        """What `millrace ...` says on the machine where it runs; lines are not folded."""
        return subprocess.run(
            [sys.executable, "-m", "services.cli", *arguments],
            env={"MILLRACE_STATE_DIR": str(self.directory), "PATH": "/usr/bin:/bin", "COLUMNS": "500"},
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT_S,
        ).stdout

    # --- the engines' books ---

    def invariants(self, *further: str) -> list[engine_pb2.CheckInvariantsResponse]:
        """What every engine says about its own bookkeeping, those at `further` addresses too."""
        answers = []
        for address in (*self.addresses("engine", "grpc"), *further):
            with grpc.insecure_channel(address) as channel:
                stub = engine_pb2_grpc.EngineServiceStub(channel)
                answers.append(stub.CheckInvariants(engine_pb2.CheckInvariantsRequest(), timeout=LIMIT_S))
        return answers

    def assert_nothing_leaked(self, *further: str) -> None:
        """Every engine's invariants hold, and no request, state or block is held, once all have ended."""

        def settled() -> bool:
            return all(
                each.num_requests == 0
                and each.num_runner_states == 0
                and each.num_unreferenced_blocks == each.num_total_blocks
                for each in self.invariants(*further)
            )

        assert eventually(settled), self.invariants(*further)
        for each in self.invariants(*further):
            assert each.ok, each.violation

    # --- traces ---

    def exported(self) -> list[bytes]:
        """What its processes have sent, as it came."""
        with closing(sqlite3.connect(f"file:{self.state.trace_store}?mode=ro", uri=True)) as store:
            return [data for (data,) in store.execute("SELECT data FROM messages ORDER BY sequence")]

    def trace(self, request_id: str, names: Sequence[str] = ()) -> list[StoredSpan]:
        """Spans of a request, once those with `names` have arrived, and Envoy's, which holds them all."""
        found: list[StoredSpan] = []

        def arrived() -> bool:
            reader = SpanReader(Path(self.state.trace_store))
            try:
                found[:] = reader.find(request_id)
            except StoreError:
                return False
            finally:
                reader.close()
            ids = {span.span_id for span in found}
            tops = [span.service for span in found if span.parent_id not in ids]
            return set(names) <= {span.name for span in found} and tops == [ENVOY]

        assert eventually(arrived), (
            set(names) - {span.name for span in found},
            [span.name for span in found],
            self.transcript(),
        )
        return found


def limited_config(store: str, lease_s: float, tenants: Sequence[str], keys: Mapping[str, str]) -> str:
    """CONFIG with limits in `store` (empty: in each gateway), tables of tenants, and a key for each name."""
    limits = f'default_tier = "standard"\n[gateway.limits]\nstore = "{store}"\nlease_ttl_s = {lease_s}'
    tables = [CONFIG.replace('default_tier = "standard"', limits), *tenants]
    for name, key in keys.items():
        hashed = hashlib.sha256(key.encode()).hexdigest()
        tables.append(f'[[keys.entries]]\nid = "{name}-1"\ntenant = "{name}"\nhash = "sha256:{hashed}"')
    return "\n".join(tables)


def eventually(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Whether `condition()` becomes true within the limit."""
    ends_s = time.monotonic() + limit_s
    while time.monotonic() < ends_s:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@contextmanager
def running_stack(
    directory: Path,
    *arguments: str,
    config: str = CONFIG,
    environment: dict[str, str] | None = None,
    model: Path | None = BUNDLED_MODEL,
) -> Iterator[Stack]:
    """`millrace up` until it is healthy; stopped, and checked to be gone, at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "millrace.toml").write_text(config)
    stack = start_stack(directory, *arguments, environment=environment, model=model)
    processes: list[psutil.Process] = []
    try:
        healthy = eventually(
            lambda: read_state(directory) is not None or stack.process.poll() is not None, START_LIMIT_S
        )
        assert healthy, stack.transcript()
        assert stack.process.poll() is None, stack.transcript()
        processes = stack.all_processes()
        yield stack
    finally:
        if stack.process.poll() is None:
            stack.process.send_signal(signal.SIGTERM)
        try:
            stack.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            stack.process.kill()
            stack.process.wait()
            raise
    assert_gone(processes)


def start_stack(
    directory: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    model: Path | None = BUNDLED_MODEL,
) -> Stack:
    """Starts `millrace up` on a free port and returns at once."""
    engines, settings = _MAKES[MAKE] if "--simulated" not in arguments else _MAKES[""]
    if not has_bundled_weights() and "--simulated" not in arguments:
        engines, settings = ("--simulated",), {}
    command = [
        *(sys.executable, "-m", "services.cli", "up", "--port", "0"),
        *("--config", str(directory / "millrace.toml")),
        # None leaves it to the file.
        *(("--model", str(model)) if model else ()),
        *engines,
        *arguments,
    ]
    output = directory / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "MILLRACE_STATE_DIR": str(directory), **settings, **(environment or {})},
            start_new_session=True,
            # A test that is killed takes its stack along.
            preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
        )
    return Stack(process, directory, output)


def run_up(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`millrace up` that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "up", *arguments],
        env={**os.environ, "MILLRACE_STATE_DIR": str(directory), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


def assert_gone(processes: Sequence[psutil.Process]) -> None:
    """No orphan is left of these processes."""

    def alive() -> list[psutil.Process]:
        return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def ended() -> bool:
        try:
            return not alive()
        except psutil.NoSuchProcess:
            return False

    assert eventually(ended, 20.0), alive()


def raw(
    stack: Stack, path: str, body: bytes, key: str | None = None, *, request_id: str = ""
) -> httpx.Response:
    """A POST of arbitrary bytes, with the client's own request id if there is one."""
    headers = {
        "authorization": f"Bearer {key or stack.state.api_key}",
        "content-type": "application/json",
        **({"x-request-id": request_id} if request_id else {}),
    }
    return httpx.post(f"{stack.url}{path}", content=body, headers=headers, timeout=LIMIT_S, trust_env=False)
