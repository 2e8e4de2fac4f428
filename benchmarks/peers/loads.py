"""The loads that every server gets."""

from __future__ import annotations

from dataclasses import dataclass

from services.bench.workload import Arrivals, Lengths, Workload


@dataclass(frozen=True, kw_only=True)
class Load:
    """A closed loop of equal requests; lengths in tokens."""

    concurrency: int
    num_requests: int
    input_tokens: int = 256
    output_tokens: int = 128
    shared_tokens: int = 0

    def workload(self, seed: int) -> Workload:
        """Greedy answers of full length to random prompts."""
        return Workload(
            num_requests=self.num_requests,
            arrivals=Arrivals(concurrency=self.concurrency),
            input_tokens=Lengths.parse(str(self.input_tokens)),
            output_tokens=Lengths.parse(str(self.output_tokens)),
            shared_prefix_tokens=self.shared_tokens,
            vocab_size=30_000,
            seed=seed,
        )


LOADS = {
    "1": Load(concurrency=1, num_requests=4),
    "8": Load(concurrency=8, num_requests=24),
    "32": Load(concurrency=32, num_requests=96),
    "64": Load(concurrency=64, num_requests=192),
    "prefix": Load(concurrency=16, num_requests=48, input_tokens=64, output_tokens=32, shared_tokens=1024),
    # Time to the first token is what counts here; one gap shows that the answer goes on.
    "prefill": Load(concurrency=1, num_requests=3, input_tokens=2048, output_tokens=2),
}

# Loads of each checkpoint; the small one shows what a framework costs per step.
DEFAULT_LOADS = {
    "qwen3-0.6b": ("1", "8", "32", "prefix"),
    "llama-40m": ("1", "32", "64"),
    "smollm2-135m": ("1", "8", "32", "prefix"),
}
