"""`millrace plan --try`: the worst case of a memory plan, driven by a real engine, beside the plan.

The engine is loaded as ever, in a process of its own, which ends with the trial (or is ended by the system
where memory runs out; that is told, too). Then all blocks of the cache are written, and steps are computed
that are as large as any may be: as many sequences as may run, at the length that fills the cache; the few
that fit at their full length; and a prompt's largest chunk at the end of the longest context. What the blocks
hold is of no account for memory, so nothing before these steps is computed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig, load
from engine.core.memory import MemoryWatch
from engine.model.plan import human
from engine.runner.base import Runner, RunnerBroken
from engine.types import (
    MemoryPlan,
    MemoryUse,
    ModelFacts,
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
)
from runtime.config import read_tables
from runtime.errors import ConfigError
from runtime.models import own_model

# Steps of each kind: what grows with their number would show.
NUM_STEPS = 3
_OVER, _CONFIG = 1, 2
# Options as most requests have them, and log-probabilities.
_SAMPLING = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, logprobs=1, ignore_eos=True)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. Bytes."""

    plan: MemoryPlan
    used: MemoryUse
    # (sequences, tokens of each, tokens computed for each) of every kind of step.
    steps: tuple[tuple[int, int, int], ...]

    @property
    def planned_bytes(self) -> int:
        """What the plan sets apart, its headroom included."""
        plan = self.plan
        weights = plan.weights_bytes + plan.adapter_bytes
        return weights + plan.workspace_bytes + plan.headroom_bytes + self.planned_cache_bytes

    @property
    def planned_cache_bytes(self) -> int:
        """Those for keys and values, and for states."""
        return self.plan.kv_cache_bytes + self.plan.state_bytes

    @property
    def used_bytes(self) -> int:
        """The measured peak."""
        return self.used.weights_bytes + self.used.kv_cache_bytes + self.used.workspace_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the plan."""
        return self.used_bytes <= self.planned_bytes


def worst_steps(config: EngineConfig, memory: MemoryPlan, facts: ModelFacts) -> list[tuple[int, int, int]]:
    """(sequences, tokens of each, tokens computed for each) of the kinds of steps that take the most."""
    scheduler = config.scheduler
    longest = min(memory.max_model_len, facts.max_model_len, memory.capacity_tokens)
    # Blocks, not tokens, are what sequences do not share.
    fitting = max(1, memory.num_blocks // -(-longest // memory.block_size))
    if memory.num_window_blocks:
        # One of them may be computing its prompt.
        fitting = max(1, min(fitting, memory.num_window_blocks // memory.most_window_blocks))
    num_full = min(scheduler.max_num_seqs, fitting)
    num_most = min(scheduler.max_num_seqs, memory.num_blocks, memory.num_window_blocks or memory.num_blocks)
    each = min(longest, memory.num_blocks // num_most * memory.block_size)
    chunk = min(scheduler.max_num_batched_tokens, longest)
    if facts.tasks:
        # Requests to a model that pools end with their prompts.
        short = max(1, chunk // num_most)
        return list(dict.fromkeys([(1, chunk, chunk), (min(num_most, chunk // short), short, short)]))
    found = [(1, longest, chunk), (num_full, longest, 1), (num_most, each, 1)]
    return [kind for kind in dict.fromkeys(found) if kind[0] and kind[1]]


def drive(runner: Runner, config: EngineConfig, memory: MemoryPlan, facts: ModelFacts) -> None:
    """Writes every block, and computes the worst steps. Raises what makes a step fail."""
    make = runner.block_bytes()
    if make is None:
        raise ConfigError("engine.simulated: a simulated engine takes no memory; leave it out to try a plan")
    blocks = make()
    zeros = bytes(blocks.num_bytes)
    for block_id in range(memory.num_blocks):
        blocks.write(block_id, zeros)
    # Slots of states and window blocks are touched as well.
    copies = tuple((0, slot) for slot in range(1, memory.num_states))
    in_windows = tuple((0, each) for each in range(1, memory.num_window_blocks))
    runner.launch(SchedulerOutput(0, state_copies=copies, window_copies=in_windows)).wait()
    ids = iter(range(1, 1 << 62))
    for number, kind in enumerate(worst_steps(config, memory, facts)):
        for plan in _plans(number * (NUM_STEPS + 1) + 1, kind, memory, facts, ids):
            result = runner.launch(plan).wait()
            failures = [result.failure, *(each.failure for each in result.results)]
            if any(failures):
                raise RunnerBroken(next(filter(None, failures)))


def _plans(
    step_id: int, kind: tuple[int, int, int], memory: MemoryPlan, facts: ModelFacts, ids: Iterator[int]
) -> Iterator[SchedulerOutput]:
    """Steps of one kind, and the end of their sequences."""
    count, num_tokens, num_computed = kind
    # The last tokens are those that the steps draw.
    num_steps = 1 if facts.tasks else NUM_STEPS
    known = max(1, num_tokens - num_steps + 1)
    num_computed = min(num_computed, known)
    size = -(-min(known + num_steps, num_tokens) // memory.block_size)
    tokens = tuple(position % facts.vocab_size for position in range(known))
    new = tuple(
        NewSequence(
            sequence_id=next(ids),
            token_ids=tokens,
            num_prompt_tokens=known,
            sampling=_SAMPLING,
            choice_index=0,
            grammar=None,
            adapter="",
            block_ids=tuple(range(each * size, (each + 1) * size)),
            state_slot=each if memory.num_states else -1,
        )
        for each in range(count)
    )
    kept = _window_blocks(new, -(-num_computed // memory.block_size), memory)
    for step in range(min(num_steps, num_tokens - known + 1)):
        start = known + step - (num_computed if step == 0 else 1)
        rows = tuple(
            ScheduledSequence(each.sequence_id, start, known + step - start, (), True) for each in new
        )
        yield SchedulerOutput(
            step_id + step,
            new_sequences=new if step == 0 else (),
            scheduled=rows,
            window_blocks=kept if step == 0 else (),
        )
    yield SchedulerOutput(step_id + NUM_STEPS, released=tuple(each.sequence_id for each in new))


def _window_blocks(
    sequences: tuple[NewSequence, ...], num_computed_blocks: int, memory: MemoryPlan
) -> tuple[tuple[int, int], ...]:
    """Window blocks of the last blocks of sequences, as many as there are for each of them."""
    each = min(memory.num_window_blocks // len(sequences), memory.most_window_blocks + num_computed_blocks)
    last = (new.block_ids[max(0, len(new.block_ids) - each) :] for new in sequences if each)
    return tuple((block_id, number) for number, block_id in enumerate(chain.from_iterable(last)))


def _measured(config_path: Path | None) -> Trial:
    """The trial, in this process. Raises ConfigError."""
    # Weights that were not packed before are read with it, and what it takes itself is in no plan.
    import torch  # noqa: F401

    from engine.runner.build import build

    tables = read_tables(config_path)
    config, model = load(tables), own_model(tables)
    if config.simulated or config.make != "millrace":
        raise ConfigError(
            'engine.make: plans of engines of this suite that compute are tried; set make = "millrace" and '
            "simulated = false"
        )
    watch = MemoryWatch()
    runner, memory, facts = build(config, model, watch.stage)
    try:
        watch.start()
        drive(runner, config, memory, facts)
        used = watch.use(memory, memory.num_blocks)
        if facts.device == "cpu":
            # An accelerator's were allocated with the blocks.
            used = MemoryUse(
                weights_bytes=used.weights_bytes,
                kv_cache_bytes=used.kv_cache_bytes + memory.state_bytes,
                workspace_bytes=max(0, used.workspace_bytes - memory.state_bytes),
            )
    finally:
        runner.close()
    return Trial(plan=memory, used=used, steps=tuple(worst_steps(config, memory, facts)))


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 where the peak is within the plan, 1 where it is not or the engine fails, 2 with one line
    on stderr where the configuration cannot work.
    """
    parser = argparse.ArgumentParser(prog="millrace plan --try", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--here", action="store_true", help="in this process: for the command itself")
    options = parser.parse_args(arguments)
    if options.here:
        try:
            print(msgspec.json.encode(_measured(options.config)).decode())
        except ConfigError as error:
            print(f"millrace plan: {error}", file=sys.stderr)
            return _CONFIG
        return 0
    inner = ["--config", str(options.config)] if options.config else []
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-m", "engine.core.plan_trial", "--here", *inner]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        return _told_failure(ended)
    trial = msgspec.json.decode(ended.stdout.splitlines()[-1], type=Trial)
    if options.json:
        plain = msgspec.to_builtins(trial)
        print(json.dumps(plain | {"planned_bytes": trial.planned_bytes, "peak_bytes": trial.used_bytes}))
    else:
        _print(trial)
    return 0 if trial.fits else _OVER


def _told_failure(ended: subprocess.CompletedProcess[str]) -> int:
    lines = ended.stderr.strip().splitlines()
    if ended.returncode == _CONFIG:
        print(lines[-1], file=sys.stderr)
        return _CONFIG
    why = f"ended with exit status {ended.returncode}: {lines[-1] if lines else 'it said nothing'}"
    if ended.returncode == -9:
        why = "was killed, as the system does where memory ends"
    print(
        f"millrace plan: the engine {why}; lower engine.cache.memory_fraction, "
        "engine.scheduler.max_num_batched_tokens or max_num_seqs",
        file=sys.stderr,
    )
    return _OVER


def _print(trial: Trial) -> None:
    plan, used = trial.plan, trial.used
    table = Table(title="Memory plan, tried")
    for name in ("part", "planned", "measured"):
        table.add_column(name, justify="left" if name == "part" else "right")
    table.add_row(
        "weights, adapters", human(plan.weights_bytes + plan.adapter_bytes), human(used.weights_bytes)
    )
    table.add_row("workspace", human(plan.workspace_bytes), human(used.workspace_bytes))
    table.add_row("headroom", human(plan.headroom_bytes), "")
    cache = "KV cache, states" if plan.state_bytes else "KV cache"
    table.add_row(cache, human(trial.planned_cache_bytes), human(used.kv_cache_bytes))
    table.add_section()
    table.add_row("peak", human(trial.planned_bytes), human(trial.used_bytes))
    console = Console()
    console.print(table)
    kinds = "; ".join(
        f"{count} x {num_tokens} tokens of which {num_computed} are computed"
        for count, num_tokens, num_computed in trial.steps
    )
    verdict = "The peak is within the plan" if trial.fits else "The peak is beyond the plan"
    console.print(f"{verdict}. Steps: {kinds}.", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
