"""`rollout.toml`: the steps of a rollout, what counts as worse, and how sure one must be."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from runtime.config import decode_table
from runtime.errors import ConfigError

# How much worse is worse: of shares of requests.
_Delta = Annotated[float, msgspec.Meta(gt=0, lt=1)]
_Probability = Annotated[float, msgspec.Meta(gt=0, lt=0.5)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class RolloutStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[steps]]`: a share of the alias's requests, and what must be seen under it before the next one."""

    share: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    # Requests that the candidate has ended, at least, and for how long.
    requests: Annotated[int, msgspec.Meta(ge=1)] = 100
    seconds: _Seconds = 60.0
    # Whether every figure must be shown not to be worse. Otherwise none must be shown to be worse.
    proof: bool = True


class LiveFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[live]`: by how much a share may be above the baseline's in the same time; 0 does not judge it."""

    # Of requests: those that failed or were refused.
    errors: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.01
    # Of requests of tiers with targets: those that missed one.
    goodput: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    # Of structured answers and tool calls: those that are not valid.
    validity: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.02


class ShadowFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[shadow]`: pairs of answers to one prompt, where the file's `[shadows]` copies requests to the
    candidate.
    """

    # How many more pairs the candidate may lose than win: its answer fails, or satisfies its schema not.
    delta: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.02
    # Mean share of the longer answer up to the first difference, at least. For a version that should say the
    # same: another kernel, format or release. 0 does not judge it.
    agreement: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


class GateFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gate]`: a suite that both models answer, beside the traffic, while the first step lasts."""

    # suite.toml, beside this file; "" is the gate's default suite.
    suite: str = ""
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 2


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    steps: tuple[RolloutStep, ...] = (
        RolloutStep(share=0.01, requests=50, seconds=60.0, proof=False),
        RolloutStep(share=0.1, requests=200, seconds=120.0),
        RolloutStep(share=0.5, requests=500, seconds=120.0),
    )
    # "by hand" waits for `millrace rollout advance` where "automatic" advances. Both take back.
    advance: Literal["automatic", "by hand"] = "automatic"
    # Probability that a candidate which is as good as the baseline is taken back, over all figures and steps.
    false_alarm: _Probability = 0.01
    # Probability that one which is worse by a delta is shown not to be, by one figure.
    miss: _Probability = 0.05
    # How often everything is looked at, in seconds. What is worse goes at the next look.
    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 1.0
    # A candidate without an engine that answers goes after so long.
    engine_grace_s: _Seconds = 10.0
    # A step that lasts longer is taken back; 0 waits.
    patience_s: _Seconds = 0.0
    # Gateways take the candidate out when nobody has watched for so long; 0 leaves the weights as they are.
    dead_man_s: _Seconds = 0.0
    live: LiveFigures = LiveFigures()
    shadow: ShadowFigures = ShadowFigures()
    gate: GateFigures | None = None

    @property
    def alarm(self) -> float:
        """What each figure may spend of `false_alarm` in each step (Bonferroni)."""
        judged = (self.live.errors, self.live.goodput, self.live.validity, self.shadow.delta)
        number = sum(each > 0 for each in (*judged, self.shadow.agreement))
        return self.false_alarm / max(1, number * len(self.steps))

    def share(self, step: int) -> float:
        """The candidate's, from 0 to 1; all of it behind the last step."""
        return self.steps[step].share if step < len(self.steps) else 1.0


def read_plan(path: Path | None) -> RolloutPlan:
    """The plan of a file, or the default one; raises ConfigError that names the key and the remedy."""
    if path is None:
        return RolloutPlan()
    try:
        plan = decode_table(str(path), tomllib.loads(path.read_text(encoding="utf-8")), RolloutPlan)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    shares = [step.share for step in plan.steps]
    if not shares:
        raise ConfigError(f"{path}.steps: there are none; leave the key out for those of the default plan")
    if shares != sorted(set(shares)):
        raise ConfigError(f"{path}.steps: shares are {shares}; each must be above the one before")
    if 0 < plan.dead_man_s < 3 * plan.interval_s:
        raise ConfigError(
            f"{path}.dead_man_s: {plan.dead_man_s:g} is less than three looks of {plan.interval_s:g} s; set "
            "it higher, or 0 for none"
        )
    if plan.gate is not None and plan.gate.suite:
        suite = path.parent / plan.gate.suite
        if not suite.is_file():
            raise ConfigError(f"{path}.gate.suite: there is no file {suite}")
        # Links stay: those that Kubernetes mounts lead to another folder in every pod.
        gate = msgspec.structs.replace(plan.gate, suite=str(suite.absolute()))
        plan = msgspec.structs.replace(plan, gate=gate)
    return plan
