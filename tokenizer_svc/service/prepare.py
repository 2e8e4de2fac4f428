"""One request from messages to token ids and grammar: the service's domain, without a wire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from millrace.tokenizer.v1 import tokenizer_pb2
from opentelemetry import trace
from opentelemetry.trace import Span

from contract.errors import MillraceError, Reason
from contract.grammar import Verdict
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.names import SpanName
from observability.emit.tracing import Telemetry
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.request import (
    EncodedGrammar,
    EncodedPrompt,
    PreparedRequest,
    Prompted,
    PromptRequest,
)
from tokenizer_svc.messages.wire import LargeRequest, large
from tokenizer_svc.prompt.limits import is_large, num_renderings
from tokenizer_svc.prompt.prompts import Prompts
from tokenizer_svc.service.compiler import GrammarCompiler, refusal
from tokenizer_svc.service.threads import INLINE_CHARACTERS, TextThreads
from tokenizer_svc.service.throttle import Throttle
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.types import Compiled, LengthLimit

# What a text of a list counts beside its characters, in the time that these take.
_TEXT_CHARACTERS = 64


class Preparer:
    """Renders, encodes and compiles for one checkpoint. Use from one event loop."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        compiler: GrammarCompiler,
        telemetry: Telemetry,
        metrics: Metrics,
        *,
        limits: PromptLimitsConfig,
        turn_cache_tokens: int,
    ) -> None:
        self.checkpoint = checkpoint
        self._prompts = Prompts(checkpoint, limits, turn_cache_tokens=turn_cache_tokens)
        self._compiler = compiler
        self._pool = compiler.pool
        self._throttle = Throttle()
        self._telemetry = telemetry
        self._metrics = metrics
        for counter in (names.GRAMMAR_LOOKUPS, names.GRAMMAR_REFUSALS):
            metrics.begin(counter)
        self._threads = TextThreads()
        self._limits = self._prompts.limits

    async def prepare(
        self,
        request: tokenizer_pb2.PrepareRequest | LargeRequest,
        *,
        tenant: str,
        length: LengthLimit,
        salt: bytes = b"",
    ) -> PreparedRequest:
        """Raises what `Prompts.prepared` raises, GRAMMAR_REFUSED, and QUEUE_LIMIT_EXCEEDED where too much of
        the tenant's waits.
        """
        if isinstance(request, tokenizer_pb2.PrepareRequest):
            gives_way = self._pool.in_debt(tenant) and request.ByteSize() >= INLINE_CHARACTERS
            if gives_way or is_large(request):
                request = large(request.SerializeToString())
        if isinstance(request, LargeRequest):
            await self._throttle.wait(tenant, len(request.wire))
        asked = PromptRequest(tenant=tenant, length=length, salt=salt)
        prompted = await self._prompted(request, asked)
        self._metrics.observe(names.PROMPT_LENGTH, prompted.num_tokens)
        start = time.perf_counter()
        if prompted.grammar is None:
            return PreparedRequest(prompt=prompted)
        compiled, cached = await self._compile(prompted.grammar, tenant)
        return PreparedRequest(
            prompt=prompted,
            compiled=compiled,
            grammar_cached=cached,
            compile_s=time.perf_counter() - start,
        )

    def prepare_short(
        self, request: tokenizer_pb2.PrepareRequest, *, tenant: str, length: LengthLimit, salt: bytes = b""
    ) -> Prompted | None:
        """The same, now, for what `is_short`; None where there is a grammar. `record_short` is later."""
        asked = PromptRequest(tenant=tenant, length=length, salt=salt)
        prompted = self._prompts.prepared(request, asked)
        return prompted if prompted.grammar is None else None

    def record_short(self, prompted: Prompted, span: Span) -> None:
        """Steps of `span`, and metrics, of what `prepare_short` did."""
        self._record(prompted, span)
        self._metrics.observe(names.PROMPT_LENGTH, prompted.num_tokens, span=span.get_span_context())

    async def encode(
        self,
        request: tokenizer_pb2.PrepareRequest,
        *,
        tenant: str | None,
        length: LengthLimit,
        salt: bytes = b"",
    ) -> Prompted:
        """Token ids of a conversation or text; packed where a worker wrote them. None is a service that asks
        for no tenant.
        """
        asked = PromptRequest(tenant=tenant or "", with_grammar=False, length=length, salt=salt)
        if not is_large(request):
            return await self._prompted(request, asked)
        whole = large(request.SerializeToString())
        if tenant is not None:
            await self._throttle.wait(tenant, len(whole.wire))
        return await self._prompted(whole, asked)

    async def _prompted(
        self, request: tokenizer_pb2.PrepareRequest | LargeRequest, asked: PromptRequest
    ) -> Prompted:
        """Prepared at once when it is short, in a thread, or in a worker when it is large."""
        if isinstance(request, LargeRequest):
            field = self._limits.large(
                request.input, request.num_input_bytes, request.num_format_bytes, asked.length
            )
            prompted = await self._in_worker(asked.encoded(request.wire, field), asked.tenant)
        else:
            work = partial(self._prompts.prepared, request, asked)
            prompted = await self._threads.run(_num_characters(request), work, asked.tenant)
        self._record(prompted, trace.get_current_span())
        return prompted

    def _record(self, prompted: Prompted, span: Span) -> None:
        begin_s, context = prompted.begin_s, span.get_span_context()
        for name, stage, seconds in (
            (names.TOKENIZER_RENDER, "render", prompted.render_s),
            (names.TOKENIZER_ENCODE, "encode", prompted.encode_s),
        ):
            if seconds:
                self._telemetry.step(name, of=span, start_s=begin_s, end_s=begin_s + seconds)
                self._metrics.observe(names.TOKENIZER_STAGE_SECONDS, seconds, span=context, stage=stage)
                begin_s += seconds

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    async def validate(self, schema_json: str, texts: list[str], *, tenant: str) -> tuple[Verdict, ...]:
        """One verdict per finished text; raises GRAMMAR_REFUSED when the schema cannot judge."""
        self._limits.grammar_size(len(schema_json), "schema_json")
        self._limits.batch(texts, "texts")
        return await self._compiler.validate(schema_json, tuple(texts), tenant=tenant)

    async def _in_worker(self, request: EncodedPrompt, tenant: str) -> Prompted:
        reply = await self._pool.run(request, tenant=tenant)
        if reply.prompted is None:
            assert reply.refused is not None
            raise refusal(reply.refused)
        return reply.prompted

    async def _compile(self, request: EncodedGrammar, tenant: str) -> tuple[Compiled, bool]:
        started_s = time.perf_counter()
        with self._stage(names.TOKENIZER_COMPILE, "compile") as attributes:
            try:
                compiled, cached = await self._compiler.compile(request, tenant=tenant)
            except MillraceError as error:
                if error.reason is Reason.GRAMMAR_REFUSED:
                    cause = error.metadata.get("overrun", "grammar")
                    self._metrics.add(names.GRAMMAR_REFUSALS, cause=cause)
                raise
            result = "hit" if cached else "miss"
            if not cached:
                elapsed_s = time.perf_counter() - started_s
                self._metrics.observe(names.GRAMMAR_COMPILE_SECONDS, elapsed_s, kind=request.kind)
            attributes |= {names.GRAMMAR_CACHE: result, names.GRAMMAR_DIGEST: compiled.artifact.digest}
            self._metrics.add(names.GRAMMAR_LOOKUPS, result=result)
        return compiled, cached

    @contextmanager
    def _stage(self, name: SpanName, stage: str) -> Iterator[dict[str, Any]]:
        """A step of the current span, with the attributes that it is given, and its time in the metrics."""
        start_s = time.monotonic()
        attributes: dict[str, Any] = {}
        error = ""
        try:
            yield attributes
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            end_s, span = time.monotonic(), trace.get_current_span()
            self._metrics.observe(names.TOKENIZER_STAGE_SECONDS, end_s - start_s, stage=stage)
            self._telemetry.step(
                name, of=span, start_s=start_s, end_s=end_s, attributes=attributes, error=error
            )


def is_short(request: tokenizer_pb2.PrepareRequest) -> bool:
    """Whether it is a short conversation alone, prepared in less time than it would wait elsewhere."""
    return (
        request.HasField("conversation")
        and not request.HasField("response_format")
        # It may be written several times.
        and not request.truncation
        # Histories go the other way before anything is done for them here.
        and request.conversation.ByteSize() < INLINE_CHARACTERS
        and not is_large(request)
    )


def _num_characters(request: tokenizer_pb2.PrepareRequest) -> int:
    """About how much work it is, see TextThreads. Ids are few here, or a worker looks at them."""
    match request.WhichOneof("input"):
        case "conversation":
            return int(request.conversation.ByteSize()) * num_renderings(request)
        case "text":
            return len(request.text)
        case "texts":
            return sum(len(each.text) + len(each.pair) + _TEXT_CHARACTERS for each in request.texts.texts)
    return 0
