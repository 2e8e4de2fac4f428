"""What all measurements of `millrace bench` are asked for: where requests go, and what they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import typer

from runtime.errors import ConfigError
from services.bench.client import REQUEST_LIMIT_S, BenchTarget
from services.bench.records import Targets
from services.bench.workload import MAX_LENGTH, Arrivals, Lengths, PromptKind, Workload
from services.cli.target import find_target


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Where requests go, and what each of them is."""

    url: Annotated[str, typer.Option(help="Server, as http://host:port; else the running stack.")] = ""
    key: Annotated[str, typer.Option(help="API key; else MILLRACE_API_KEY, else the stack's own.")] = ""
    model: Annotated[str, typer.Option(help="Model; the first one listed when empty.")] = ""
    burstiness: Annotated[float, typer.Option(min=0.01, help="1 is Poisson, less comes in bursts.")] = 1.0
    input_tokens: Annotated[str, typer.Option(help="256, uniform:64:512 or lognormal:256:0.5.")] = "256"
    output_tokens: Annotated[str, typer.Option(help="Same forms as --input-tokens.")] = "128"
    shared_prefix: Annotated[
        int, typer.Option(min=0, max=MAX_LENGTH, help="Tokens that all prompts begin with.")
    ] = 0
    tier: Annotated[list[str] | None, typer.Option(help="Share of a tier, as gold=0.2; repeat.")] = None
    prompts: Annotated[PromptKind, typer.Option(help="How prompts are made.")] = "token_ids"
    vocab_size: Annotated[int, typer.Option(min=2, help="Upper bound of random token ids.")] = 2000
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, not counted.")] = 1
    request_limit: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which a request has failed.")
    ] = REQUEST_LIMIT_S
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds send equal requests.")] = 0
    ttft_target_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None
    tpot_target_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None
    e2e_target_ms: Annotated[float | None, typer.Option(min=0, help="Target for goodput.")] = None
    label: Annotated[str, typer.Option(help="Name of the run in reports.")] = "millrace"
    ignore_eos: Annotated[bool, typer.Option(help="Ask for full-length answers.")] = True

    def workload(self, num_requests: int, arrivals: Arrivals) -> Workload:
        """What is sent; raises ConfigError that names the option."""
        return Workload(
            num_requests=num_requests,
            arrivals=arrivals,
            input_tokens=Lengths.parse(self.input_tokens),
            output_tokens=Lengths.parse(self.output_tokens),
            shared_prefix_tokens=self.shared_prefix,
            tiers=parse_tiers(self.tier or []),
            prompt_kind=self.prompts,
            vocab_size=self.vocab_size,
            token_id_low=min(300, self.vocab_size - 1),
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            seed=self.seed,
        )

    @property
    def targets(self) -> Targets:
        """What a request must reach to count as goodput."""
        return Targets(ttft_ms=self.ttft_target_ms, tpot_ms=self.tpot_target_ms, e2e_ms=self.e2e_target_ms)

    def target(self) -> tuple[BenchTarget, str]:
        """Where requests go, and its address for reports; raises ConfigError."""
        stack = find_target(self.url)
        return BenchTarget.parse(stack.url, self.key or stack.api_key), stack.url


def parse_tiers(texts: list[str]) -> dict[str, float]:
    """Shares of tiers by name; raises ConfigError for what is none."""
    tiers: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            share = float(number)
        except ValueError:
            share = 0.0
        if not (name and share > 0 and math.isfinite(share)) or name in tiers:
            raise ConfigError(
                f"--tier {text!r}: expected <name>=<share>, as in gold=0.2, once for each tier and above 0"
            )
        tiers[name] = share
    return tiers
