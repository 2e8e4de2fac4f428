"""What was measured of one request, and the figures made of many."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.bench.events import EventStream


class RequestRecord(msgspec.Struct, kw_only=True):
    """Times in seconds of one clock (time.perf_counter). `error` is empty when the stream was whole."""

    index: int
    tier: str
    prompt_tokens: int
    status: int = 0
    error: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    # Of an open loop: how long after its planned start it was sent.
    late_s: float = 0.0
    # Arrival of every chunk that carried output.
    chunk_times_s: list[float] = msgspec.field(default_factory=list)
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    # That the answer names: another one than was asked for may have given it.
    model: str = ""

    def read_events(self, events: EventStream) -> None:
        """Takes usage and model from the last events of a stream that has ended, and says what it lacks."""
        self.error = events.error
        for payload in events.last:
            try:
                event = msgspec.json.decode(payload)
            except ValueError:
                self.error = self.error or "an event of the stream is not JSON"
                continue
            if not isinstance(event, dict):
                continue
            self.model = str(event.get("model") or self.model)
            usage = event.get("usage")
            if isinstance(usage, dict):
                self.prompt_tokens = _count(usage, "prompt_tokens") or self.prompt_tokens
                self.completion_tokens = _count(usage, "completion_tokens")
                self.cached_prompt_tokens = _count(usage.get("prompt_tokens_details"), "cached_tokens")
        if not self.completion_tokens:
            # A server without usage: one chunk is one token.
            self.completion_tokens = len(self.chunk_times_s)
        if not self.error and not self.chunk_times_s:
            self.error = "the stream carried no output"
        if not self.error and not events.is_done:
            self.error = "the stream ended without [DONE]"

    @property
    def ok(self) -> bool:
        """Whether the request was answered in full."""
        return self.status == 200 and not self.error

    @property
    def is_wrong(self) -> bool:
        """Whether the server refuses it for what it is, be it alone: neither too much nor too slow."""
        return 400 <= self.status < 500 and self.status not in (408, 429)

    @property
    def ttft_s(self) -> float:
        """Time to the first chunk with output."""
        return self.chunk_times_s[0] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.completion_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between chunks."""
        return [
            later - earlier
            for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)
        ]


def _count(table: object, key: str) -> int:
    """A count of tokens that a server reports; 0 when it is none."""
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 0
    return max(0, int(value))


class Percentiles(msgspec.Struct, frozen=True):
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles | None:
        """None for an empty sample."""
        if not seconds:
            return None
        # Not at the top: every command of the command line loads this module, the supervisor's as well.
        import numpy as np

        values = np.asarray(seconds) * 1000
        return cls(
            *(
                float(round(value, 3))
                for value in (values.mean(), *np.percentile(values, (50, 90, 99)), values.max())
            )
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run, or of one tier of it. Rates are per second of the run's whole duration."""

    num_requests: int
    num_failed: int
    duration_s: float
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    # Requests per second that met every target; None without targets.
    goodput_per_s: float | None
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must reach to count as goodput; None asks nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> bool:
        """Whether any target is set."""
        return (self.ttft_ms, self.tpot_ms, self.e2e_ms) != (None, None, None)

    def met(self, record: RequestRecord) -> bool:
        """Whether the request was answered within every target."""
        if not record.ok:
            return False
        measured = (record.ttft_s, record.tpot_s or 0.0, record.end_s - record.start_s)
        wanted = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        return all(
            limit is None or value * 1000 <= limit for value, limit in zip(measured, wanted, strict=True)
        )


def summarize(records: Sequence[RequestRecord], duration_s: float, targets: Targets) -> Summary:
    """Figures over `records`. Latencies count answered requests only; failures are counted beside them."""
    answered = [record for record in records if record.ok]
    prompt = sum(record.prompt_tokens for record in answered)
    completion = sum(record.completion_tokens for record in answered)
    met = sum(targets.met(record) for record in answered)
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(answered),
        duration_s=round(duration_s, 3),
        prompt_tokens=prompt,
        cached_prompt_tokens=sum(record.cached_prompt_tokens for record in answered),
        completion_tokens=completion,
        requests_per_s=round(len(answered) / duration_s, 3),
        output_tokens_per_s=round(completion / duration_s, 2),
        total_tokens_per_s=round((prompt + completion) / duration_s, 2),
        goodput_per_s=round(met / duration_s, 3) if targets.given else None,
        ttft_ms=Percentiles.of([record.ttft_s for record in answered]),
        tpot_ms=Percentiles.of([tpot for record in answered if (tpot := record.tpot_s) is not None]),
        itl_ms=Percentiles.of([gap for record in answered for gap in record.itls_s]),
        e2e_ms=Percentiles.of([record.end_s - record.start_s for record in answered]),
    )
