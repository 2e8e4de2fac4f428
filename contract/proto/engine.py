"""What goes between gateways and engines. Each token passes here, so messages are made of plain fields:
protobuf copies a message into another by writing and reading it.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from millrace.common.v1 import output_pb2, retention_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2
from msgspec.structs import asdict

from contract.engines import AdapterInfo, BlocksEvicted, BlocksStored, EngineInfo, EngineLoad, KvEvent
from contract.outputs import NUMBERS, ChoiceStatistics, EngineTime, FirstToken, TokenLogprobs
from contract.retention import RECOMPUTE, Retention
from contract.sampling import OPTIONS, SCALARS, SamplingOptions, SamplingParams, scalars_of
from contract.thinking import ThinkingTags

# Sampling options: from a message, and as the fields of one.

# Normal number of 32 bits.
_SMALLEST_FLOAT = 2.0**-126
_FLOATS = tuple(name for name in SCALARS if OPTIONS[name].kind is float)


def sampling_options(message: sampling_pb2.SamplingOptions) -> SamplingOptions:
    """What a client set; the rest is None."""
    return SamplingOptions(**sampling_given(message), stop=tuple(message.stop))


def sampling_given(message: sampling_pb2.SamplingOptions) -> dict[str, Any]:
    """The numbers that the message sets and all lists but the stop strings, by name, in Python's types."""
    has: Any = message.HasField
    found: dict[str, Any] = {name: getattr(message, name) for name in SCALARS if has(name)}
    for name in _FLOATS:
        if name in found:
            found[name] = _exact(found[name])
    found["logit_bias"] = dict(message.logit_bias)
    found["allowed_token_ids"] = tuple(message.allowed_token_ids)
    found["stop_token_ids"] = tuple(message.stop_token_ids)
    return found


def _exact(value: float) -> float:
    # Floats of the wire have 32 bits: 0.1 arrives as 0.10000000149, which nobody meant.
    return value if value.is_integer() else float(f"{value:.7g}")


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Every option set, so that no default of the receiver's matters."""
    found: dict[str, Any] = dict(zip(SCALARS, scalars_of(params), strict=True))
    # The wire's 32 bits would round less to 0, which engines refuse; either keeps the likeliest token alone.
    found["top_p"] = max(params.top_p, _SMALLEST_FLOAT)
    found["logit_bias"] = params.logit_bias
    found["allowed_token_ids"] = params.allowed_token_ids
    found["stop_token_ids"] = params.stop_token_ids
    return found


def retention(message: retention_pb2.Retention) -> Retention:
    """What an answer may forget, from the wire; not checked."""
    has: Any = message.HasField
    return Retention(
        policy=message.policy,
        keep=message.keep if has("keep") else None,
        window_tokens=message.window_tokens if has("window_tokens") else None,
        if_possible=message.if_possible,
        max_lost=message.max_lost if has("max_lost") else None,
        beyond=message.beyond or RECOMPUTE,
    )


def retention_fields(asked: Retention | None) -> dict[str, Any] | None:
    """The fields of what an answer may forget; None where that is nothing."""
    return None if asked is None else asdict(asked)


_SEQUENCES = ("line_breaks", "blank_line", "open_rest", "name", "lead", "answer", "other_ends")


def thinking_tags(message: engine_pb2.ThinkingTags) -> ThinkingTags:
    """The tags around a thought, from the wire."""
    return ThinkingTags(
        open_id=message.open_id if message.HasField("open_id") else None,
        close_id=message.close_id,
        opened=message.opened,
        **{name: tuple(getattr(message, name)) for name in _SEQUENCES},
    )


_ADAPTER = attrgetter(*AdapterInfo.__struct_fields__)
_INFO = EngineInfo.__struct_fields__
_LOAD = EngineLoad.__struct_fields__
_FIRST_TOKEN = FirstToken.__struct_fields__
_engine_time_of = attrgetter(*EngineTime.__struct_fields__)
_numbers_of = attrgetter(*NUMBERS)
_load_of = attrgetter(*_LOAD)
_first_token_of = attrgetter(*_FIRST_TOKEN)


def logprobs_fields(logprobs: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """The fields of messages with log-probabilities and their alternatives."""
    return [
        {
            "token_id": each.token_id,
            "logprob": each.logprob,
            "top": [{"token_id": token_id, "logprob": value} for token_id, value in each.top],
        }
        for each in logprobs
    ]


def logprobs(messages: Iterable[output_pb2.TokenLogprob]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities from the wire."""
    return tuple(
        TokenLogprobs(
            each.token_id,
            each.logprob,
            tuple([top.token_id for top in each.top]),
            tuple([top.logprob for top in each.top]),
        )
        for each in messages
    )


def first_token_fields(first: FirstToken) -> dict[str, Any]:
    """The fields of the engine's part of the time to the first token."""
    return dict(zip(_FIRST_TOKEN, _first_token_of(first), strict=True))


def first_token(message: engine_pb2.FirstTokenTimings) -> FirstToken:
    """The engine's part of the time to the first token, from the wire."""
    return FirstToken(*_first_token_of(message))


def statistics_fields(statistics: ChoiceStatistics) -> dict[str, Any]:
    """The fields of what a choice took, of whatever more detailed record this is."""
    fields = dict(zip(NUMBERS, _numbers_of(statistics), strict=True))
    fields["engine_time"] = asdict(statistics.engine_time)
    return fields


def statistics(message: engine_pb2.ChoiceStatistics) -> ChoiceStatistics:
    """What a choice took, from the wire."""
    found = ChoiceStatistics(*_numbers_of(message))
    found.engine_time = engine_time(message)
    found.delayed_by_s = dict(message.delayed_by_s)
    return found


def engine_time(message: engine_pb2.ChoiceStatistics) -> EngineTime:
    """What an engine spent, from the wire."""
    return EngineTime(*_engine_time_of(message.engine_time))


def info(message: engine_pb2.EngineInfo) -> EngineInfo:
    """An engine's description from the wire."""
    values = {name: getattr(message, name) for name in _INFO}
    return EngineInfo(**values | {"unsupported": tuple(message.unsupported)})


def adapters(message: engine_pb2.Adapters) -> dict[str, AdapterInfo]:
    """What names stand for at an engine, from the wire."""
    return {each.name: AdapterInfo(*_ADAPTER(each)) for each in message.names}


def load_fields(load: EngineLoad, *, draining: bool) -> dict[str, Any]:
    """The fields of an engine's report, of whatever more detailed report this is."""
    return dict(zip(_LOAD, _load_of(load), strict=True)) | {"draining": draining}


def load(message: engine_pb2.EngineLoad) -> EngineLoad:
    """An engine's report from the wire."""
    return EngineLoad(*_load_of(message))


def kv_event_message(event: KvEvent) -> engine_pb2.KvEvent:
    """A change of an engine's prefix cache for the wire."""
    if isinstance(event, BlocksStored):
        stored = engine_pb2.BlocksStored(block_hashes=event.block_hashes, parent_hash=event.parent_hash)
        return engine_pb2.KvEvent(stored=stored)
    return engine_pb2.KvEvent(evicted=engine_pb2.BlocksEvicted(block_hashes=event.block_hashes))


def kv_event(message: engine_pb2.KvEvent) -> KvEvent:
    """A change of an engine's prefix cache from the wire."""
    if message.HasField("stored"):
        return BlocksStored(tuple(message.stored.block_hashes), message.stored.parent_hash)
    return BlocksEvicted(tuple(message.evicted.block_hashes))
