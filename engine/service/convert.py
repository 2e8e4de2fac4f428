"""Between the wire and the engine's types. The only module here, besides the servicer, that sees protos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from millrace.common.v1 import context_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2

from contract.engines import AdapterInfo
from contract.errors import MillraceError, invalid, unsupported
from contract.pooling import PoolingParams
from contract.proto import engine as convert
from contract.proto.engine import first_token_fields, logprobs_fields, retention, statistics_fields
from contract.proto.grammar import grammar
from contract.proto.status import to_detail
from contract.retention import CHOOSING, SCORED, Retention
from contract.retention import check as check_retention
from contract.sampling import SamplingParams, check, check_ids, check_token_ids
from contract.thinking import ThinkingTags
from engine.config import EngineConfig
from engine.service.adapters import ServedAdapters
from engine.types import MemoryPlan, ModelFacts, Request, TokenEvent, TokenLogprobs
from engine.types.hand_over import TICKET_BYTES, BlockSource

# A message's fields by their names. Messages inside messages are given so: protobuf copies a message into
# another by writing and reading it.
Fields: TypeAlias = dict[str, Any]


# Of a token, whose log-probabilities are computed.
_MOST_ALTERNATIVES = 20


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What submissions are checked against."""

    facts: ModelFacts
    # Longest prompt plus completion that fits into the KV cache as well.
    max_tokens_total: int
    simulated: bool
    adapters: ServedAdapters
    # See engine.role.
    role: str = "both"


def to_request(
    submit: engine_pb2.Submit,
    context: context_pb2.RequestContext,
    limits: ModelLimits,
    *,
    request_id: int,
    now_s: float,
    now_unix_ms: int,
) -> Request:
    """The request of a submission whose context is verified; raises MillraceError naming the field."""

    def after(limit_ms: Literal["ttft_target_ms", "queue_limit_ms"]) -> float | None:
        return now_s + getattr(context, limit_ms) / 1000 if context.HasField(limit_ms) else None

    prompt = tuple(submit.prompt_token_ids)
    output = tuple(submit.output_token_ids)
    check_ids("prompt_token_ids", prompt, limits.facts.vocab_size, invalid)
    check_ids("output_token_ids", output, limits.facts.vocab_size, invalid)
    if submit.HasField("grammar") and limits.simulated:
        raise unsupported("grammar", "the simulated engine has no grammar; use a real model")
    pooling = _pooling(submit, limits)
    if pooling is not None:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    else:
        sampling = to_sampling(submit.sampling, limits, num_prompt_tokens=len(prompt))
    told = sampling.logprobs
    if submit.confidence_top:
        sampling = _with_confidence(submit.confidence_top, sampling)
    thinking = _thinking(submit, sampling, limits)
    if output and (sampling.best_of > 1 or sampling.beam_width):
        raise invalid("output_token_ids", "it continues one choice; resubmit each choice with n = 1")
    if sampling.beam_width and submit.HasField("grammar"):
        # A grammar ends a choice whatever ignore_eos says, and a beam knows its end by the stop token.
        stop_ids = dict.fromkeys((*sampling.stop_token_ids, *limits.facts.eos_token_ids))
        sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(stop_ids))
    return Request(
        request_id=request_id,
        external_id=context.request_id,
        client_request_id=context.client_request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        output_token_ids=output,
        choice_index=submit.choice_index,
        grammar=grammar(submit.grammar) if submit.HasField("grammar") else None,
        thinking=thinking,
        pooling=pooling,
        retention=_retention(submit, sampling, limits),
        hand_over=_ticket(submit, sampling, limits),
        source=_source(submit),
        confidence_top=submit.confidence_top,
        num_told=told,
        adapter=limits.adapters.version(submit.adapter, submit.adapter_version) if submit.adapter else "",
        tenant=context.tenant,
        tier=context.tier,
        priority=context.priority,
        weight=context.weight if context.HasField("weight") and context.weight > 0 else 1.0,
        cache_salt=context.cache_salt,
        arrival_s=now_s,
        ttft_deadline_s=after("ttft_target_ms"),
        tpot_target_s=context.tpot_target_ms / 1000 if context.HasField("tpot_target_ms") else None,
        queue_deadline_s=after("queue_limit_ms"),
        deadline_s=(
            now_s + (context.deadline_unix_ms - now_unix_ms) / 1000
            if context.HasField("deadline_unix_ms")
            else None
        ),
        max_context_tokens=context.max_context_tokens if context.HasField("max_context_tokens") else None,
        traceparent=context.traceparent,
        tracestate=context.tracestate,
    )


def _with_confidence(top: int, sampling: SamplingParams) -> SamplingParams:
    if top > _MOST_ALTERNATIVES:
        raise invalid("confidence_top", f"{top} is above the limit of {_MOST_ALTERNATIVES}; lower it")
    if sampling.best_of > sampling.n or sampling.beam_width:
        raise invalid("confidence_top", "beams and best_of tell answers at their end; leave one of them out")
    return msgspec.structs.replace(sampling, logprobs=max(top, sampling.logprobs or 0))


def _ticket(submit: engine_pb2.Submit, sampling: SamplingParams, limits: ModelLimits) -> bytes:
    """Under which its blocks are held for another engine; empty where none are."""
    if not submit.hand_over:
        return b""
    if limits.role != "prefill":
        raise invalid("hand_over", 'this engine hands nothing over; ask one of engine.role = "prefill"')
    if len(submit.hand_over) != TICKET_BYTES:
        raise invalid("hand_over", f"it has {len(submit.hand_over)} bytes; give {TICKET_BYTES} of chance")
    if sampling.best_of > 1 or sampling.beam_width or submit.HasField("kv") or submit.HasField("pooling"):
        raise invalid("hand_over", "one choice that forgets nothing is handed over; leave it out")
    return submit.hand_over


def _source(submit: engine_pb2.Submit) -> BlockSource | None:
    if not submit.HasField("source"):
        return None
    given = submit.source
    if not given.address or len(given.ticket) != TICKET_BYTES:
        raise invalid("source", f"give an address, and a ticket of {TICKET_BYTES} bytes")
    return BlockSource(given.address, given.ticket)


def _retention(submit: engine_pb2.Submit, sampling: SamplingParams, limits: ModelLimits) -> Retention | None:
    if not submit.HasField("kv"):
        return None
    asked = retention(submit.kv)
    check_retention(asked, invalid)
    if not asked.forgets:
        return None
    if because := limits.facts.remembers_because:
        if asked.if_possible:
            return None
        problem = f"{asked.policy} is not for this model: {because}"
        raise unsupported("kv.policy", "leave kv out, or ask for full", problem)
    if asked.policy in CHOOSING and (because := _unchosen_because(asked, sampling, limits)):
        if asked.if_possible:
            return None
        problem = f"{asked.policy} chooses what stays of a prompt: {because}"
        raise unsupported("kv.policy", "leave kv out, or ask for window+sinks", problem)
    if asked.max_lost is not None:
        because = limits.facts.unmeasured_because or limits.facts.unplanned_because
        if limits.simulated:
            because = "the simulated engine has no attention"
        if sampling.beam_width:
            because = "beams share what they forget"
        if because:
            remedy = "leave it out, or, where the tier has set it, kv"
            raise unsupported("kv.max_lost", remedy, f"no bound can be told: {because}")
    return asked


def _unchosen_because(asked: Retention, sampling: SamplingParams, limits: ModelLimits) -> str:
    """Why no tokens can be chosen of the prompt; empty where they can."""
    if sampling.beam_width:
        return "beams share all that was computed"
    unscored = limits.facts.unscored_because if asked.policy == SCORED else ""
    return limits.facts.unmeasured_because or unscored


def _pooling(submit: engine_pb2.Submit, limits: ModelLimits) -> PoolingParams | None:
    tasks = limits.facts.tasks
    if not submit.HasField("pooling"):
        if tasks:
            raise unsupported("pooling", f"the model pools what it reads; ask for {' or '.join(tasks)}")
        return None
    asked = submit.pooling
    if not tasks:
        raise unsupported("pooling", "the model generates; ask one that pools")
    if asked.task not in tasks:
        raise invalid("pooling.task", f"{asked.task!r} is not served; ask for {' or '.join(tasks)}")
    if asked.dimensions > limits.facts.num_pooled:
        problem = f"{asked.dimensions} were asked for, and embeddings have {limits.facts.num_pooled}"
        raise invalid("pooling.dimensions", problem)
    if submit.HasField("grammar") or submit.HasField("thinking") or submit.output_token_ids:
        raise invalid("pooling", "nothing is generated: leave out grammar, thinking and output_token_ids")
    task: Any = asked.task
    return PoolingParams(task=task, dimensions=asked.dimensions)


def texts_of(
    submit: engine_pb2.Submit, whole: Request, next_id: Callable[[], int]
) -> list[tuple[int, Request]]:
    """The texts of a submission to a model that pools, each a request of its own, with their indexes. Raises
    INVALID_ARGUMENT where they are not what the prompt consists of.
    """
    assert whole.pooling is not None, "it pools"
    texts, start = [], 0
    for text in submit.pooling.texts:
        ids = whole.prompt_token_ids[start : start + text.num_tokens]
        start += text.num_tokens
        asked = msgspec.structs.replace(whole.pooling, second_start=text.second_start)
        request = msgspec.structs.replace(whole, request_id=next_id(), prompt_token_ids=ids, pooling=asked)
        texts.append((text.index, request))
    if start != len(whole.prompt_token_ids) or not all(request.prompt_token_ids for _, request in texts):
        problem = f"they have {start} tokens, and the prompt {len(whole.prompt_token_ids)}"
        raise invalid("pooling.texts", f"{problem}: give every text at least one, and all of them")
    if not texts or len({index for index, _ in texts}) < len(texts):
        raise invalid("pooling.texts", "give at least one, each with an index of its own")
    return texts


def _thinking(
    submit: engine_pb2.Submit, sampling: SamplingParams, limits: ModelLimits
) -> ThinkingTags | None:
    budget, field = sampling.max_thinking_tokens, "sampling.max_thinking_tokens"
    if budget is None:
        return None
    if not submit.HasField("thinking"):
        raise invalid("thinking", f"it is required with {field}: the tags around what the model thinks")
    tags = convert.thinking_tags(submit.thinking)
    if budget < tags.least:
        raise invalid(field, f"{budget} is less than the {tags.least} tokens that end a thought")
    check_ids("thinking", tags.ids, limits.facts.vocab_size, invalid)
    return tags


def to_sampling(
    options: sampling_pb2.SamplingOptions, limits: ModelLimits, *, num_prompt_tokens: int
) -> SamplingParams:
    """Complete sampling parameters; unset options are neutral. Raises MillraceError naming the option."""
    if not options.HasField("seed"):
        raise _invalid("seed", "it must be set, so that another engine can continue the same tokens")
    given = {
        "max_tokens": max(1, limits.max_tokens_total - num_prompt_tokens),
        **convert.sampling_given(options),
    }
    given.setdefault("best_of", given.get("n", 1))
    ends = () if options.ignore_eos else limits.facts.eos_token_ids
    given["stop_token_ids"] = tuple(dict.fromkeys((*options.stop_token_ids, *ends)))
    params = SamplingParams(**given)
    check(params, _invalid)
    check_token_ids(params, limits.facts.vocab_size, _invalid)
    return params


def _invalid(option: str, problem: str) -> MillraceError:
    return invalid(f"sampling.{option}", problem)


# Towards the gateway.


def to_info(
    memory: MemoryPlan,
    facts: ModelFacts,
    config: EngineConfig,
    *,
    engine_id: str,
    model: str,
    revision: str = "",
    fingerprint: str,
    adapters: tuple[str, ...] = (),
    unsupported_options: tuple[str, ...] = (),
) -> engine_pb2.EngineInfo:
    """What this engine is."""
    parts = {field.name: getattr(memory, field.name) for field in engine_pb2.MemoryPlan.DESCRIPTOR.fields}
    return engine_pb2.EngineInfo(
        engine_id=engine_id,
        model=model,
        revision=revision,
        vocabulary_fingerprint=fingerprint,
        max_model_len=memory.max_model_len,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        adapters=adapters,
        pool=config.pool,
        role="" if config.role == "both" else config.role,
        unsupported=unsupported_options,
        dtype=facts.dtype,
        attention_backend=facts.attention_backend,
        device=facts.device,
        memory=engine_pb2.MemoryPlan(**parts),
    )


def to_adapters(known: Sequence[AdapterInfo]) -> Fields:
    """The fields of Adapters."""
    served = [each for each in known if each.version]
    return {
        "served": [each.name for each in served],
        "loaded": [each.name for each in served if each.loaded],
        "names": [msgspec.structs.asdict(each) for each in known],
    }


def to_output(event: TokenEvent, handle: int, text_index: int = 0, request: Request | None = None) -> Fields:
    """The RequestOutput with one choice's news of one step; of a text its index takes the choice's place.
    Where the `request` asks for confidences, these stand for the alternatives that they are made of.
    """
    if event.withheld_tokens:
        return {"handle": handle, "withheld_tokens": event.withheld_tokens}
    choice_index = text_index + event.choice_index
    output: Fields = {"handle": handle, "choice_index": choice_index, "token_ids": event.token_ids}
    if event.pooled:
        output["pooled"] = event.pooled
    reports = event.logprobs
    if reports and request is not None and request.confidence_top:
        output["confidences"] = [each.confidence(request.confidence_top) for each in reports]
        reports = _told(reports, request.num_told)
    if reports:
        output["logprobs"] = logprobs_fields(reports)
    if event.prompt_logprobs:
        output["prompt_logprobs"] = logprobs_fields(event.prompt_logprobs)
    if event.finish_reason is not None:
        output["finish_reason"] = int(event.finish_reason)
    if event.stop_token_id is not None:
        output["stop_token_id"] = event.stop_token_id
    if event.failure is not None:
        output["error"] = to_detail(event.failure)
    if event.first_token is not None:
        output["first_token"] = first_token_fields(event.first_token.parts)
    if event.statistics is not None:
        output["statistics"] = statistics_fields(event.statistics)
    return output


def _told(reports: tuple[TokenLogprobs, ...], number: int | None) -> tuple[TokenLogprobs, ...]:
    if number is None:
        return ()
    return tuple(
        TokenLogprobs(each.token_id, each.logprob, each.top_ids[:number], each.top_logprobs[:number])
        for each in reports
    )
