"""Races many clients over several gateway processes against one real Redis and counts what was admitted.

`python -m benchmarks.limits_race [--processes 4] [--clients 16] [--seconds 75]`

Every client asks again as soon as it was answered. For each limit the program looks at every interval of 60 s
(or, for slots, at every moment) as the clients saw it, and prints the largest sum next to the stated bound.
The moments are those of the answers, so an interval can look fuller than it was by what is answered within
one round trip of its edges; that is printed as the tolerance of the measurement.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.report import Row, options, publish
from contract.errors import MillraceError, Reason
from gateway.auth.directory import KeyDirectory
from gateway.config import LimitsConfig
from gateway.limits.counter import RequestLimiter
from gateway.limits.limiter import TokenLimiter
from gateway.limits.prices import Prices
from gateway.limits.redis_store import RedisLimitStore
from gateway.settings import load_settings
from gateway.types.request import Identity

REQUESTS_PER_MINUTE = 3000
TOKENS_PER_MINUTE = 200_000
STREAMS = 8
MONTHLY_TOKENS = 100_000
WINDOW_S = 60.0
TABLES = {
    "security": {"context_secret": "a secret for the race of limits"},
    "tenants": {
        "requests": {"requests_per_minute": REQUESTS_PER_MINUTE},
        "tokens": {"tokens_per_minute": TOKENS_PER_MINUTE},
        "streams": {"max_concurrent_streams": STREAMS},
        "month": {"monthly_tokens": MONTHLY_TOKENS},
    },
}


@dataclass
class Seen:
    """What the clients of one process saw. Moments are Unix seconds."""

    # (moment, amount) of what was admitted and stayed charged.
    requests: list[tuple[float, int]]
    tokens: list[tuple[float, int]]
    # (moment, +1 or -1) of slots taken and returned.
    slots: list[tuple[float, int]]
    month_tokens: int
    num_calls: int
    num_refused: int
    # Longest time between a question and its answer.
    longest_call_s: float


class _Process:
    """One gateway process with its clients."""

    def __init__(self, url: str, seed: int, end_s: float) -> None:
        settings = load_settings(TABLES)
        self._store = RedisLimitStore(url, lease_ttl_s=30, timeout_s=10)
        directory = KeyDirectory(settings)
        self._requests = RequestLimiter(self._store, directory)
        self._tokens = TokenLimiter(self._store, directory, Prices({}), LimitsConfig())
        self._random = random.Random(seed)
        self._end_s = end_s
        self.seen = Seen([], [], [], 0, 0, 0, 0.0)

    async def run(self, num_clients: int) -> Seen:
        kinds = (self._request, self._token, self._stream, self._month)
        await asyncio.gather(*(self._client(kinds[number % len(kinds)]) for number in range(num_clients)))
        await self._store.close()
        return self.seen

    async def _client(self, ask) -> None:  # type: ignore[no-untyped-def]
        while time.time() < self._end_s:
            self.seen.num_calls += 1
            begin_s = time.time()
            try:
                await ask()
            except MillraceError as error:
                self.seen.num_refused += 1
                if error.reason is Reason.LIMITS_UNAVAILABLE:
                    raise
                # A refused client comes back soon, as an impolite one would.
                await asyncio.sleep(0.02 * self._random.random())
            self.seen.longest_call_s = max(self.seen.longest_call_s, time.time() - begin_s)

    def _identity(self, tenant: str) -> Identity:
        return Identity(request_id="r", tenant=tenant, key_id="k", tier="standard")

    async def _request(self) -> None:
        await self._requests.admit("requests", "k")
        self.seen.requests.append((time.time(), 1))

    async def _token(self) -> None:
        prompt, most = self._random.randrange(1, 500), self._random.randrange(1, 1000)
        reservation = await self._tokens.reserve(self._identity("tokens"), prompt, most)
        admitted_s = time.time()
        used = self._random.randrange(most + 1)
        await reservation.settle(prompt, used)
        self.seen.tokens.append((admitted_s, prompt + used))

    async def _stream(self) -> None:
        reservation = await self._tokens.reserve(self._identity("streams"), 1, 1)
        self.seen.slots.append((time.time(), 1))
        await asyncio.sleep(0.01 * self._random.random())
        # Returned from here on: until the settlement is answered, the slot is nobody's.
        self.seen.slots.append((time.time(), -1))
        await reservation.settle(1, 1)

    async def _month(self) -> None:
        most = self._random.randrange(1, 200)
        reservation = await self._tokens.reserve(self._identity("month"), 10, most)
        granted = reservation.remaining_completion_budget() or 0
        used = self._random.randrange(granted + 1)
        await reservation.settle(10, used)
        self.seen.month_tokens += 10 + used


def _run_process(arguments: tuple[str, int, float, int]) -> Seen:
    url, seed, end_s, num_clients = arguments
    return asyncio.run(_Process(url, seed, end_s).run(num_clients))


@contextmanager
def redis_server() -> Iterator[str]:
    """A Redis of its own, without persistence."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise SystemExit("redis-server is not installed: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "socket"
        command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not socket.exists():
                time.sleep(0.01)
            yield f"unix://{socket}"
        finally:
            process.terminate()
            process.wait()


def busiest(charges: list[tuple[float, int]], length_s: float) -> int:
    """Largest sum in any interval of this length."""
    charges = sorted(charges)
    total = most = first = 0
    for moment, amount in charges:
        total += amount
        while charges[first][0] <= moment - length_s:
            total -= charges[first][1]
            first += 1
        most = max(most, total)
    return most


def most_at_once(changes: list[tuple[float, int]]) -> int:
    """Largest running sum; what is returned at a moment is returned before anything is taken at it."""
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def main() -> None:
    """Prints one line a limit, and JSON with --json."""
    parser = options(__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16, help="per process")
    parser.add_argument("--seconds", type=float, default=75.0)
    chosen = parser.parse_args()
    with redis_server() as url:
        end_s = time.time() + chosen.seconds
        work = [(url, seed, end_s, chosen.clients) for seed in range(chosen.processes)]
        with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
            seen = pool.map(_run_process, work, chunksize=1)
    tolerance_s = max(each.longest_call_s for each in seen)
    length_s = WINDOW_S - tolerance_s
    limits = {
        "requests/min": (REQUESTS_PER_MINUTE, busiest([c for s in seen for c in s.requests], length_s)),
        "tokens/min": (TOKENS_PER_MINUTE, busiest([c for s in seen for c in s.tokens], length_s)),
        "streams": (STREAMS, most_at_once([c for s in seen for c in s.slots])),
        "tokens/month": (MONTHLY_TOKENS, sum(each.month_tokens for each in seen)),
    }
    rows: list[Row] = [
        {"limit": name, "allowed": limit, "admitted": found, "over": max(0, found - limit), "bound": 0}
        for name, (limit, found) in limits.items()
    ]
    notes = (
        f"{chosen.processes} gateway processes x {chosen.clients} clients, {chosen.seconds:g} s, "
        f"{sum(each.num_calls for each in seen)} calls ({sum(each.num_refused for each in seen)} refused); "
        f"intervals are looked at by the longest call shorter, {tolerance_s * 1000:.0f} ms"
    )
    publish("Limits shared by gateways over one Redis", rows, chosen.json, notes)


if __name__ == "__main__":
    main()
