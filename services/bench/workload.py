"""What is sent and when: a deterministic plan of requests made from a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import msgspec

from runtime.errors import ConfigError

# Imported where it is used: every command of the command line loads this module, the supervisor's as well.
if TYPE_CHECKING:
    import numpy as np

# How prompts are made: random token ids, random words, or random words as a chat message.
PromptKind = Literal["token_ids", "text", "chat"]

_WORDS = (
    *("river", "mill", "stone", "wheel", "water", "grain", "flour", "bread", "village", "market", "bridge"),
    *("garden", "winter", "summer", "autumn", "spring", "carpenter", "baker", "teacher", "doctor", "farmer"),
    *("sailor", "letter", "number", "colour", "music", "window", "kitchen", "mountain", "valley"),
)

# Longer than any model reads.
MAX_LENGTH = 10_000_000


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of lengths in tokens, written `256`, `uniform:64:512` or `lognormal:256:0.5`.

    `lognormal` takes the median and the standard deviation of the logarithm.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: float
    high: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ConfigError that quotes `text` and the accepted forms."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        expected = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
        # Comparisons of "nan" are all false.
        usable = len(values) == expected and all(0 <= value <= MAX_LENGTH for value in values)
        if not usable or values[0] < 1 or (kind == "uniform" and values[1] < values[0]):
            raise ConfigError(
                f"length {text!r}: expected a number of tokens, uniform:<low>:<high> or "
                f"lognormal:<median>:<sigma>, from 1 to {MAX_LENGTH:,} and the lower one first"
            )
        return cls(kind, *values)  # type: ignore[arg-type]

    def draw(self, generator: np.random.Generator, count: int) -> list[int]:
        """`count` lengths, each at least 1."""
        if self.kind == "fixed":
            return [int(self.low)] * count
        if self.kind == "uniform":
            return [int(value) for value in generator.integers(int(self.low), int(self.high) + 1, count)]
        logarithms = generator.normal(math.log(self.low), self.high, count)
        longest = math.log(MAX_LENGTH)
        return [max(1, round(math.exp(min(float(value), longest)))) for value in logarithms]


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """When requests start. Closed loop: `concurrency` at a time. Open loop: `rate` per second on average.

    `burstiness` is the shape of the gamma distribution of the gaps: 1 is a Poisson process, smaller values
    come in bursts, larger ones are more regular.
    """

    concurrency: int = 1
    rate: float = 0.0
    burstiness: float = 1.0

    @property
    def open_loop(self) -> bool:
        """Whether requests start by the clock, however many are under way."""
        return self.rate > 0

    def starts(self, generator: np.random.Generator, count: int) -> list[float]:
        """Start of each request in seconds after the first moment; zeros in a closed loop."""
        if not self.open_loop:
            return [0.0] * count
        gaps = generator.gamma(self.burstiness, 1.0 / (self.rate * self.burstiness), count)
        return list(accumulate(map(float, gaps)))


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what is sent. Equal workloads with equal seeds send equal requests."""

    num_requests: int
    arrivals: Arrivals
    input_tokens: Lengths
    output_tokens: Lengths
    # Tokens at the start of every prompt that are the same for all requests, on top of input_tokens.
    shared_prefix_tokens: int = 0
    # Service tier to its share of the requests; empty sends none.
    tiers: Mapping[str, float] = {}
    prompt_kind: PromptKind = "token_ids"
    # Random token ids are drawn from [token_id_low, vocab_size).
    vocab_size: int = 2000
    token_id_low: int = 300
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the plan."""

    index: int
    start_s: float
    tier: str
    path: str
    body: bytes
    prompt_tokens: int


def plan(workload: Workload, model: str) -> list[PlannedRequest]:
    """The requests in the order of their starts."""
    from numpy.random import default_rng

    generator = default_rng(workload.seed)
    count = workload.num_requests
    starts = workload.arrivals.starts(generator, count)
    inputs = workload.input_tokens.draw(generator, count)
    outputs = workload.output_tokens.draw(generator, count)
    tiers = _draw_tiers(generator, workload.tiers, count)
    prefix = _tokens(generator, workload, workload.shared_prefix_tokens)
    requests = []
    for index in range(count):
        prompt = prefix + _tokens(generator, workload, inputs[index])
        body = _body(workload, model, prompt, outputs[index], tiers[index])
        requests.append(
            PlannedRequest(
                index=index,
                start_s=starts[index],
                tier=tiers[index],
                path="/v1/chat/completions" if workload.prompt_kind == "chat" else "/v1/completions",
                body=msgspec.json.encode(body),
                prompt_tokens=len(prompt),
            )
        )
    return requests


def _draw_tiers(generator: np.random.Generator, tiers: Mapping[str, float], count: int) -> list[str]:
    if not tiers:
        return [""] * count
    names = list(tiers)
    total = math.fsum(tiers.values())
    shares = [share / total for share in tiers.values()]
    return [names[choice] for choice in generator.choice(len(names), count, p=shares)]


def _tokens(generator: np.random.Generator, workload: Workload, count: int) -> list[int]:
    if workload.prompt_kind == "token_ids":
        low, high = workload.token_id_low, workload.vocab_size
        return [int(value) for value in generator.integers(low, high, count)]
    return [int(value) for value in generator.integers(0, len(_WORDS), count)]


def _body(workload: Workload, model: str, prompt: list[int], max_tokens: int, tier: str) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.ignore_eos:
        body["ignore_eos"] = True
    if tier:
        body["service_tier"] = tier
    if workload.prompt_kind == "token_ids":
        body["prompt"] = prompt
        return body
    text = " ".join(_WORDS[word] for word in prompt)
    if workload.prompt_kind == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    return body
