"""Three models behind one door, in memory for two of them.

`python -m benchmarks.on_demand [--model models/millrace-nano] [--requests 200] [--clients 8] [--kills 5]
[--json ...]`

Requests name the three in random order, some clients at a time. Of those whose model was in memory when they
were sent (the baseline), and of the others, which wait for a load: how many were answered by the model that
they name, and the time to the first token. Then engines are killed in the middle of loads, while clients wait
for them.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.engine.report import options, percentile, publish
from benchmarks.stack import RunningStack, running_stack

NAMES = ("red", "green", "blue")
_LIMIT_S = 120.0
_POLL_S = 0.02
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 16
# Requests that wait for a load whose engine is killed.
_WAITING = 3


@dataclass(frozen=True, kw_only=True)
class OnDemandRequest:
    """One request, and what came of it."""

    model: str
    was_loaded: bool
    # 0 where nothing came.
    first_token_s: float = 0.0
    answered: bool = False


class OnDemandClient:
    """What clients see of a stack."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        state = stack.state
        self._url, self._pid = stack.url, state.pid
        self._headers = {"authorization": f"Bearer {state.api_key}"}

    def states(self) -> dict[str, str]:
        """Model to "unloaded", "loading" or "loaded"."""
        listed = httpx.get(f"{self._url}/v1/models", headers=self._headers, timeout=_LIMIT_S, trust_env=False)
        return {each["id"]: each["state"] for each in listed.json()["data"] if each["id"] in NAMES}

    def ask(self, model: str, seed: int) -> OnDemandRequest:
        """One streamed answer."""
        drawn = random.Random(seed)
        body = {
            "model": model,
            "prompt": [drawn.randrange(300, 2000) for _ in range(_PROMPT_TOKENS)],
            "max_tokens": _OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        was_loaded = self.states()[model] == "loaded"
        began_s, first_s, finished, by = time.perf_counter(), 0.0, False, ""
        with httpx.stream(
            "POST",
            f"{self._url}/v1/completions",
            json=body,
            headers=self._headers,
            timeout=_LIMIT_S,
            trust_env=False,
        ) as answer:
            if answer.status_code != httpx.codes.OK:
                raise SystemExit(f"refused: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    first_s = first_s or time.perf_counter() - began_s
                    by = chunk.get("model", by)
                finished = finished or line == "data: [DONE]"
        return OnDemandRequest(
            model=model, was_loaded=was_loaded, first_token_s=first_s, answered=finished and by == model
        )

    def engines(self) -> set[int]:
        """Process ids of engines, their cores left out."""
        found = set()
        for child in psutil.Process(self._pid).children():
            with suppress(psutil.Error):
                if "engine" in child.cmdline():
                    found.add(child.pid)
        return found


def _config(model: Path) -> str:
    tables = "".join(f'[models.{name}]\npath = "{model.resolve()}"\nload = "on demand"\n' for name in NAMES)
    return f"""
[observability]
sample_ratio = 0.0
[tenants.development]
tokens_per_minute = 1000000000
requests_per_minute = 1000000
[supervisor]
on_demand_models = 2
{tables}"""


def _started(door: OnDemandClient, before: set[int]) -> set[int]:
    """Engines that were not there before, as soon as there are some."""
    ends_s = time.monotonic() + _LIMIT_S
    while not (found := door.engines() - before):
        if time.monotonic() > ends_s:
            raise SystemExit(f"no engine was started within {_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
    return found


def _killed_loads(door: OnDemandClient, num_kills: int) -> list[OnDemandRequest]:
    """Requests during loads whose first engine is killed."""
    found: list[OnDemandRequest] = []
    with ThreadPoolExecutor(_WAITING) as clients:
        for turn in range(num_kills):
            states = door.states()
            # With two of three in memory there is always one to load.
            model = next(name for name in NAMES if states[name] != "loaded")
            before = door.engines()
            waiting = [clients.submit(door.ask, model, 1000 * turn + each) for each in range(_WAITING)]
            for pid in _started(door, before):
                with suppress(psutil.Error):
                    psutil.Process(pid).send_signal(signal.SIGKILL)
            found += [each.result() for each in waiting]
    return found


def _row(what: str, asked: Sequence[OnDemandRequest]) -> dict[str, Any]:
    times = [1000 * each.first_token_s for each in asked if each.answered]
    return {
        "requests": what,
        "sent": len(asked),
        "answered": sum(each.answered for each in asked),
        "ttft p50 ms": percentile(times, 0.5),
        "ttft p90 ms": percentile(times, 0.9),
        "ttft max ms": max(times, default=float("nan")),
    }


def main() -> int:
    """Prints the table; 1 where a request was not answered."""
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/millrace-nano"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    chosen = random.Random(0)
    asked = [chosen.choice(NAMES) for _ in range(arguments.requests)]
    with running_stack(_config(arguments.model)) as stack:
        door = OnDemandClient(stack)
        with ThreadPoolExecutor(arguments.clients) as clients:
            found = list(clients.map(door.ask, asked, range(len(asked))))
        killed = _killed_loads(door, arguments.kills)
    rows = [
        _row("model in memory", [each for each in found if each.was_loaded]),
        _row("model not in memory", [each for each in found if not each.was_loaded]),
        _row("its engine killed while it loads", killed),
    ]
    title = f"{len(asked)} requests to three models, two in memory, {arguments.clients} clients"
    publish(title, rows, arguments.json)
    return 0 if all(each.answered for each in (*found, *killed)) else 1


if __name__ == "__main__":
    sys.exit(main())
