"""`millrace plan --devices N`: by which degrees a model can be shared among up to N devices of the same
memory, what each then holds, what ranks tell each other, and which is the fewest that fit.

Ranks compute on the CPUs of one machine; a device is what one of them has, such as a socket with its memory.
What they exchange is counted as `kernels/ranks` sends it: parts of sums in float32, rows of experts, hidden
states between stages, and logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from checkpoint.files import find
from engine.config import EngineConfig, ParallelConfig
from engine.model.families import read_spec
from engine.model.plan import PlanInput, human, plan_and_fullest, plan_input
from engine.model.shards import why_not_shared
from engine.model.spec import ModelSpec
from engine.types import MemoryPlan
from kernels.ranks.shares import Degrees
from runtime.config import ModelConfig
from runtime.errors import ConfigError

_FLOAT_BYTES = 4


class Devices(msgspec.Struct, frozen=True):
    """Up to `count` devices of `num_bytes` of memory each."""

    count: int
    num_bytes: int


class SharedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one way to share a model gives and costs."""

    tensor: int
    expert: int
    pipeline: int
    fits: bool
    # Why it does not; empty where it does. And whether that is another setting than memory.
    reason: str = ""
    is_refused: bool = False
    # Of the fullest device; 0 where it does not fit.
    weights_bytes: int = 0
    # Slots of the states that layers carry from token to token, and what a device has of one at most.
    num_states: int = 0
    state_bytes: int = 0
    # Tokens of keys and values that all together hold.
    capacity_tokens: int = 0
    # What ranks write for others for each token whose logits are wanted, all together.
    exchanged_bytes_per_token: int
    # How often a step waits until ranks have met, one behind another.
    meetings_per_step: int

    @property
    def degrees(self) -> Degrees:
        """The degrees."""
        return Degrees(tensor=self.tensor, expert=self.expert, pipeline=self.pipeline)


def shared_plans(
    config: EngineConfig,
    model: ModelConfig,
    devices: Devices,
    why_too_small: Callable[[PlanInput, MemoryPlan], str],
) -> list[SharedPlan]:
    """Every way that the model can be shared, fewest devices first, and of as many the least exchange.
    `why_too_small` says why a plan does not do for what is asked; "" where it does.
    """
    spec = read_spec(find(model.path))
    ways = list(_ways(spec, devices.count))
    if len(ways) == 1 < devices.count:
        # It says why there is no other.
        ways.append(Degrees(tensor=2))
    found = [_shared(config, model, spec, degrees, devices, why_too_small) for degrees in ways]
    return sorted(found, key=lambda each: (each.degrees.size, each.exchanged_bytes_per_token))


def _ways(spec: ModelSpec, most: int) -> Iterator[Degrees]:
    """Degrees of up to `most` ranks that the model may have."""
    sizes = range(1, most + 1)
    for pipeline in sizes:
        for tensor in range(1, most // pipeline + 1):
            for expert in range(1, most // pipeline + 1):
                degrees = Degrees(tensor=tensor, expert=expert, pipeline=pipeline)
                divides = not (degrees.stage_size % tensor or degrees.stage_size % expert)
                if divides and (degrees.size == 1 or why_not_shared(spec, degrees) is None):
                    yield degrees


def _shared(
    config: EngineConfig,
    model: ModelConfig,
    spec: ModelSpec,
    degrees: Degrees,
    devices: Devices,
    why_too_small: Callable[[PlanInput, MemoryPlan], str],
) -> SharedPlan:
    values = {name: getattr(degrees, name) for name in Degrees.__struct_fields__}
    # As many threads as ranks: how many cores this machine has is not asked.
    config = msgspec.structs.replace(
        config, parallel=ParallelConfig(**values), num_threads=max(config.num_threads, degrees.size)
    )
    exchanged, meetings = _exchange(spec, degrees)
    plan = SharedPlan(**values, fits=False, exchanged_bytes_per_token=exchanged, meetings_per_step=meetings)
    replace, available = msgspec.structs.replace, devices.num_bytes * degrees.size
    try:
        config.validate()
        given = plan_input(config, model, device="cpu", available_bytes=available)
    except ConfigError as error:
        return replace(plan, reason=str(error), is_refused=True)
    states = [each.spec.state for each in given.stages or (given,)]
    try:
        memory, given = plan_and_fullest(given)
    except ConfigError as error:
        return replace(plan, reason=str(error))
    reason = why_too_small(given, memory)
    return replace(
        plan,
        fits=not reason,
        reason=reason,
        weights_bytes=memory.weights_bytes,
        num_states=memory.num_states,
        state_bytes=max(0 if state is None else state.num_bytes for state in states),
        capacity_tokens=memory.capacity_tokens,
    )


def _exchange(spec: ModelSpec, degrees: Degrees) -> tuple[int, int]:
    """Bytes for a token whose logits are wanted, and meetings of a step."""
    if degrees.size == 1:
        return 0, 0
    experts = spec.experts
    num_sparse = len(experts.layers) if experts is not None and degrees.expert > 1 else 0
    # Of what each layer's halves give; those of experts are told row by row.
    sums = _num_products(spec) - num_sparse if degrees.tensor > 1 else 0
    floats = sums * degrees.tensor * spec.hidden_size
    if spec.state is not None and degrees.tensor > max(1, spec.state.num_groups) and spec.state.norm_spans:
        # Squares of each group of heads, which lies on several ranks.
        sums += len(spec.state.layers)
        floats += len(spec.state.layers) * degrees.tensor
    if num_sparse and experts is not None:
        floats += num_sparse * experts.num_active * (experts.latent_size or spec.hidden_size)
    floats += (degrees.pipeline - 1) * spec.hidden_size + spec.vocab_size
    return _FLOAT_BYTES * floats, sums + num_sparse + degrees.pipeline


def _num_products(spec: ModelSpec) -> int:
    """Attention's and states' outputs, and feed-forwards'."""
    return len(spec.attending) + len(spec.feeding) + (0 if spec.state is None else len(spec.state.layers))


def told(plans: list[SharedPlan], devices: Devices) -> str:
    """The fewest devices that fit, or why none do; and what the configuration forbids."""
    lines = [each.reason for each in plans if each.is_refused][:1]
    fitting = next((each for each in plans if each.fits), None)
    if fitting is not None:
        values = {name: getattr(fitting, name) for name in Degrees.__struct_fields__}
        asked = ", ".join(f"engine.parallel.{name} = {value}" for name, value in values.items() if value > 1)
        count = fitting.degrees.size
        what = f"{count} devices of {human(devices.num_bytes)} fit" if count > 1 else "one device fits"
        return "\n".join([*lines, f"{what}: {asked or 'no engine.parallel is needed'}."])
    lines.append(f"None of these fits into devices of {human(devices.num_bytes)}.")
    lines += [f"With {each.degrees.size}: {each.reason}" for each in plans if not each.is_refused][-1:]
    return "\n".join(lines)
