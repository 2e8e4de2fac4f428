"""`millrace plan`: prints the memory plan before anything is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from checkpoint.files import find
from engine.config import EngineConfig, load
from engine.model.device import choose_device
from engine.model.families import read_spec
from engine.model.kv_memory import KvShare, kv_bytes_per_token, kv_shares
from engine.model.kv_scorer import find_scorer
from engine.model.plan import PlanInput, human, plan_and_fullest, plan_input, window_room_of
from engine.model.plan_devices import Devices, SharedPlan, shared_plans, told
from engine.model.rank_checks import degrees_of_file
from engine.types import MemoryPlan
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from kernels.ranks.shares import MOST_RANKS, Degrees
from runtime.config import ModelConfig, load_section, read_tables
from runtime.errors import ConfigError


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, 1 when the load that is asked for does not fit, or 2 with one line on stderr when the
    configuration cannot work.
    """
    options, asked = _parsed(arguments)
    try:
        tables = read_tables(options.config)
        config = load(tables)
        device, available = choose_device(config)
        model = load_section(tables, "model", ModelConfig)
        if options.devices:
            return _share(config, model, asked, options, available)
        given = plan_input(config, model, device=device, available_bytes=available)
        plan, given = plan_and_fullest(given)
        find_scorer(config.cache.kvzap, find(model.path), given.whole, given.remembers_because)
    except ConfigError as error:
        print(f"millrace plan: {error}", file=sys.stderr)
        return 2
    placed = asked.placed(given, plan) if asked is not None else None
    if options.json:
        derived = {
            "capacity_tokens": plan.capacity_tokens,
            "decoding_blocks_per_sequence": decoding_blocks(given, plan),
            "num_sequences": num_sequences(plan),
        }
        if placed is not None:
            derived["load"] = msgspec.to_builtins(placed)
        print(json.dumps(_facts(given, model) | msgspec.to_builtins(plan) | derived))
    else:
        _print_table(given, model, plan)
        if placed is not None:
            print(placed.sentence)
    return 0 if placed is None or placed.fits else 1


def _share(
    config: EngineConfig,
    model: ModelConfig,
    asked: AskedLoad | None,
    options: argparse.Namespace,
    available: int,
) -> int:
    """Prints how several devices may share the model; each has its part of this machine's memory, where it is
    not said.
    """
    size = int(options.device_gib * 2**30) or available // options.devices
    devices = Devices(options.devices, size)

    def why_too_small(given: PlanInput, plan: MemoryPlan) -> str:
        placed = None if asked is None else asked.placed(given, plan)
        return "" if placed is None or placed.fits else placed.outcome

    plans = shared_plans(config, model, devices, why_too_small)
    if options.json:
        print(
            json.dumps({"model": model.served_name, "device_bytes": size, "ways": msgspec.to_builtins(plans)})
        )
    else:
        Console().print(_ways_table(plans, model, devices))
        print(told(plans, devices))
    return 0 if any(each.fits for each in plans) else 1


def _parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, AskedLoad | None]:
    parser = argparse.ArgumentParser(prog="millrace plan", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    for name, what in (
        ("streams", "answers that are written at the same time"),
        ("prompt", "tokens of each prompt"),
        ("output", "tokens of each answer"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="devices that may share it")
    parser.add_argument(
        "--device-gib", type=float, default=0.0, help="memory of each; 0 is a part of what is free"
    )
    options = parser.parse_args(arguments)
    if options.device_gib and not options.devices:
        parser.error("--device-gib is the memory of each of --devices N; give both")
    counts = (options.streams, options.prompt, options.output)
    if any(counts) and not all(counts):
        parser.error("--streams, --prompt and --output go together")
    return options, AskedLoad(*counts) if all(counts) else None


class PlacedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of answers that are asked for at the same time."""

    fits: bool
    # How many run together at their full length; the others wait.
    streams_at_once: int
    blocks_per_stream: int
    # Whether they fit, and what helps; and the same as a sentence.
    outcome: str
    sentence: str


class AskedLoad(msgspec.Struct, frozen=True):
    """Answers at the same time, and the tokens of each one's prompt and text."""

    streams: int
    prompt: int
    output: int

    def placed(self, given: PlanInput, plan: MemoryPlan) -> PlacedLoad:
        """Whether all run together, by the same count of blocks as admission makes."""
        length, seats = self.prompt + self.output, given.config.scheduler.max_num_seqs
        blocks = self._blocks(given, plan)
        in_windows = min(-(-length // plan.block_size), plan.most_window_blocks)
        by_memory = 0 if length > plan.max_model_len else int(plan.streams_of(blocks, in_windows))
        at_once = min(self.streams, seats, by_memory)
        asked = f"{self.streams} streams of {self.prompt} + {self.output} tokens"
        held = f"{self.streams * blocks} of {plan.num_blocks} blocks"
        if in_windows:
            held += f", and {self.streams * in_windows} of {plan.num_window_blocks} in windows"
        if at_once == self.streams:
            outcome = f"fit: they hold {held} at their full length"
        elif length > plan.max_model_len:
            outcome = f"do not fit: {length} tokens are more than max_model_len {plan.max_model_len}"
        elif by_memory < seats:
            outcome = (
                f"do not fit at once: they need {held}; {at_once} run together and the others wait "
                "(engine.cache.memory_fraction, engine.cache.kv_dtype, more engines)"
            )
        else:
            outcome = (
                f"do not run at once: engine.scheduler.max_num_seqs is {seats}; the others wait "
                "(set it higher, or start more engines)"
            )
        speed = "Tokens per second are known once it runs: millrace bench run"
        return PlacedLoad(
            fits=at_once == self.streams,
            streams_at_once=at_once,
            blocks_per_stream=blocks,
            outcome=f"{asked} {outcome}",
            sentence=f"{asked} {outcome}.\n{speed} --concurrency {self.streams}.",
        )

    def _blocks(self, given: PlanInput, plan: MemoryPlan) -> int:
        """Most blocks that one stream holds: a prompt has all of its own, however far layers look back."""
        whole = -(-(self.prompt + self.output) // plan.block_size)
        return min(whole, max(-(-self.prompt // plan.block_size), decoding_blocks(given, plan)))


def _facts(given: PlanInput, model: ModelConfig) -> dict[str, object]:
    return {
        "model": model.served_name,
        "architecture": given.spec.architecture,
        "num_weights": given.num_weights,
        "device": given.device,
        "num_ranks": given.num_ranks,
        **{f"{name}_degrees": _degrees(given, model, name) for name in Degrees.__struct_fields__},
        "dtype": given.dtype,
        "quantization": quantization_of(given),
        "weight_forms": msgspec.to_builtins(given.forms),
        "kv_dtype": given.kv_dtype,
        "kv_shares": msgspec.to_builtins(_kv_shares(given)),
    }


def _degrees(given: PlanInput, model: ModelConfig, name: str) -> list[int]:
    """Values of one key of `engine.parallel` that the model may be shared by."""
    folder = find(model.path)
    return [1] if given.device != "cpu" else degrees_of_file(read_spec(folder), folder, name, MOST_RANKS)


def _ranks(given: PlanInput, model: ModelConfig) -> str:
    """What ranks there may be, and what one of them has; empty where there may be none."""
    said = []
    for name in Degrees.__struct_fields__:
        fitting = _degrees(given, model, name)
        if len(fitting) > 1:
            all_up_to = len(fitting) > 2 and fitting[-1] == len(fitting)
            values = f"1 to {fitting[-1]}" if all_up_to else ", ".join(map(str, fitting))
            said.append(f"engine.parallel.{name} may be {values}")
    if given.num_ranks == 1:
        return "; ".join(said)
    degrees, experts, has = given.shard.degrees, given.spec.experts, []
    has.append(f"1/{degrees.tensor} of each layer" if degrees.tensor > 1 else "all of each layer")
    most = ""
    if given.shard.layers is not None:
        has.insert(0, f"{given.spec.num_layers} of {given.whole.num_layers} layers")
        most = " at most"
    if experts is not None:
        held = len(given.shard.held(experts.num_experts))
        parts = f"1/{degrees.expert_parts} of " if degrees.expert_parts > 1 else ""
        has.append(f"{parts}{held} of its {experts.num_experts} experts")
    together = f"which take so much together{most}"
    one = f"all above is one's of {given.num_ranks}, {together}; it has {', '.join(has)}"
    return "; ".join([one, *said])


def _in_other_forms(given: PlanInput) -> str:
    """How many times the tokens other values of kv_dtype would hold; empty where there is no smaller one."""
    taken, replace = kv_bytes_per_token(given.spec, given.kv_dtypes), msgspec.structs.replace
    found = []
    for name in ("int8", BY_CHANNEL):
        config = replace(given.config, cache=replace(given.config.cache, kv_dtype=name))
        try:
            other = replace(given, config=config).kv_dtypes
        except ConfigError:
            continue
        times = taken / max(1, kv_bytes_per_token(given.spec, other))
        if times > 1:
            blocks = f" (block_size {KEY_GROUP})" if name == BY_CHANNEL else ""
            found.append(f"{name} {times:.1f}{blocks}")
    return f"; times as many with engine.cache.kv_dtype: {', '.join(found)}" if found else ""


def _kv_shares(given: PlanInput) -> list[KvShare]:
    """What each type of keys and values takes, its layers numbered as the whole model's."""
    own = given.shard.layers
    return kv_shares(given.spec, given.kv_dtypes, 0 if own is None else own.start)


def _kv_mix(given: PlanInput) -> str:
    """The type of keys and values; where layers differ, each one's bytes and layers."""
    shares = _kv_shares(given)
    if len(shares) < 2:
        return shares[0].kv_dtype if shares else "no layer attends: blocks say where states are kept"
    each = (f"{human(share.bytes_per_token)} {share.kv_dtype} in layers {share.layers}" for share in shares)
    return ", ".join(each)


def decoding_blocks(given: PlanInput, plan: MemoryPlan) -> int:
    """Most blocks that one sequence of max_model_len holds while it decodes: all that it has filled, or,
    where every layer has a window, those of the window, one that has left it in part and one of slack.
    """
    whole = -(-plan.max_model_len // plan.block_size)
    # A draft model reads the same blocks, as far back as it likes.
    if given.whole.window is None or given.draft is not None:
        return whole
    return min(whole, -(-given.whole.window // plan.block_size) + 2)


def num_sequences(plan: MemoryPlan) -> float:
    """Sequences of max_model_len that the cache holds once their prompts are computed."""
    fitting = plan.capacity_tokens / plan.max_model_len
    if not plan.num_window_blocks:
        return fitting
    return plan.streams_of(-(-plan.max_model_len // plan.block_size), plan.most_window_blocks)


def _behind_window(given: PlanInput, plan: MemoryPlan) -> str:
    """What a sliding window changes; empty where it changes nothing."""
    if plan.num_window_blocks:
        whole = plan.kv_cache_bytes / (plan.kv_bytes_per_token * plan.max_model_len)
        return (
            f" ({whole:.1f} if all layers kept all), of which layers with a window of {plan.window} hold "
            f"{plan.most_window_blocks} blocks each: they have {plan.num_window_blocks}, which take "
            f"{human(plan.num_window_blocks * plan.block_size * plan.window_bytes_per_token)}"
        )
    why_not = window_room_of(given).why_not
    if why_not:
        return f"; layers with a window of {given.spec.sliding_reach} keep all, since {why_not}"
    held = decoding_blocks(given, plan)
    if held * plan.block_size >= plan.max_model_len:
        return ""
    return (
        f", admitted with all blocks of their prompts; {plan.num_blocks / held:.1f} once they decode "
        f"and hold {held} blocks for a window of {given.whole.window}"
    )


def _states(given: PlanInput, plan: MemoryPlan) -> str:
    """What layers carry from token to token, beside keys and values."""
    if given.spec.state is None:
        return "no layer has one"
    seats = given.config.scheduler.max_num_seqs
    return (
        f"{plan.num_states} of {human(given.spec.state.num_bytes)}: {seats} of sequences that run, and "
        f"copies, one every {plan.state_interval} tokens, from which prompts that begin alike go on"
    )


def _forgotten(given: PlanInput, plan: MemoryPlan) -> str:
    if not plan.forgotten_bytes:
        return "engine.cache.forgotten_bytes is 0: no answer says what it lost (kv.max_lost)"
    tokens = plan.forgotten_bytes // max(1, plan.forgotten_block_bytes) * plan.block_size
    whose = "" if given.device == "cpu" else ", in the host's memory"
    return f"of {tokens} tokens, for answers that say what they lost (kv.max_lost){whose}"


def _scorer(given: PlanInput) -> str:
    """Of the weights those of a scorer; empty where there is none."""
    if not given.scorer_bytes or given.device != "cpu":
        return ""
    return f"; {human(given.scorer_bytes)} of them score keys and values (engine.cache.kvzap)"


def _ways_table(plans: list[SharedPlan], model: ModelConfig, devices: Devices) -> Table:
    """The ways side by side."""
    table = Table(title=f"{model.served_name} on up to {devices.count} devices of {human(devices.num_bytes)}")
    table.add_column("devices", justify="right", no_wrap=True)
    table.add_column("engine.parallel", no_wrap=True)
    for name in ("weights", "tokens", "states", "exchange", "meetings"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for each in plans:
        degrees = ((name, getattr(each, name)) for name in Degrees.__struct_fields__)
        table.add_row(
            str(each.degrees.size),
            ", ".join(f"{name} {value}" for name, value in degrees if value > 1) or "-",
            human(each.weights_bytes) if each.weights_bytes else "-",
            str(each.capacity_tokens or "-"),
            f"{each.num_states} of {human(each.state_bytes)}" if each.num_states else "-",
            human(each.exchanged_bytes_per_token),
            str(each.meetings_per_step),
            "yes" if each.fits else "no",
        )
    table.caption = (
        "weights of the fullest device; tokens of keys and values that all hold; states of sequences, and a "
        "device's part of one; what they tell each other for a token, and how often a step waits until they "
        "have met"
    )
    return table


def quantization_of(given: PlanInput) -> str:
    """How weights are stored: the checkpoint's method, or what is made at load; empty when dense."""
    stored = given.spec.quantization
    if stored is not None:
        return stored.method
    return "" if given.config.quantize == "off" else given.config.quantize


def _forms_of(given: PlanInput) -> str:
    """Which forms weights are held in, and at how many bits; empty where all have the serving type."""
    if all(form.form == "dense" for form in given.forms):
        return ""
    total = sum(form.num_weights for form in given.forms)
    shares = []
    for form in given.forms:
        # Norms and biases are not worth a word.
        if form.num_weights >= total / 1000:
            bits = f"{form.bits:.3g} bits" if form.bits else given.dtype
            shares.append(f"{form.num_weights / total:.0%} {form.form} in {bits}")
    return ": " + ", ".join(shares)


def _print_table(given: PlanInput, model: ModelConfig, plan: MemoryPlan) -> None:
    types = " in ".join(filter(None, (quantization_of(given), given.dtype)))
    table = Table(
        title=f"Memory plan of {model.served_name} ({given.spec.architecture}, {types}, {given.device})"
    )
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("what", overflow="fold")
    used = plan.weights_bytes + plan.workspace_bytes + plan.headroom_bytes + plan.kv_cache_bytes
    on_device = plan.forgotten_bytes if given.device == "cpu" else 0
    used += plan.adapter_bytes + plan.state_bytes + on_device
    adapters = given.config.adapters
    rows = [
        (
            "weights",
            plan.weights_bytes,
            f"{given.num_weights / 1e6:.1f} M elements and rotary tables{_forms_of(given)}{_scorer(given)}",
        ),
        ("adapters", plan.adapter_bytes, f"{adapters.num_slots} slots of rank {adapters.max_rank}"),
        (
            "workspace",
            plan.workspace_bytes,
            f"steps of {given.config.scheduler.max_num_batched_tokens} tokens",
        ),
        ("headroom", plan.headroom_bytes, "allocator, process"),
        (
            "KV cache",
            plan.kv_cache_bytes,
            f"{plan.num_blocks} blocks of {plan.block_size} = {plan.capacity_tokens} tokens of "
            f"{human(plan.kv_bytes_per_token)} ({_kv_mix(given)}); "
            f"{num_sequences(plan):.1f} sequences of {plan.max_model_len} tokens"
            + _behind_window(given, plan)
            + _in_other_forms(given),
        ),
        ("states", plan.state_bytes, _states(given, plan)),
        ("forgotten keys", plan.forgotten_bytes, _forgotten(given, plan)),
        ("unused", plan.total_bytes - used, "left to the machine"),
    ]
    for name, size, what in rows:
        table.add_row(name, human(size), what)
    table.add_section()
    table.add_row("available", human(plan.total_bytes), f"free memory of {given.device}")
    ranks = _ranks(given, model)
    if ranks:
        table.add_row("ranks", human(used * given.num_ranks), ranks)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
