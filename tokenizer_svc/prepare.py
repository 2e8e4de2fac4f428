"""One request from messages to token ids and grammar: the service's domain, without a wire."""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.trace import Span

from contract.chat import Conversation, ResponseFormat
from contract.errors import MillraceError, Reason
from contract.grammar import Verdict
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.names import SpanName
from observability.emit.tracing import Attributes, Telemetry
from tokenizer_svc.checkpoint import Checkpoint
from tokenizer_svc.config import LimitsConfig
from tokenizer_svc.grammar.cache import GrammarCompiler, refusal
from tokenizer_svc.grammar.request import (
    EncodedGrammar,
    EncodedPrompt,
    GrammarRequest,
    Prompted,
    PromptRequest,
)
from tokenizer_svc.limits import num_characters
from tokenizer_svc.prompt import Prompts
from tokenizer_svc.threads import TextThreads
from tokenizer_svc.types import Compiled, LengthLimit, Prepared, Truncation
from tokenizer_svc.wire import LargeRequest

ANY_LENGTH = LengthLimit()
# What is shorter, and rendered as well, is prepared in less time than anything takes to wait for it.
_SHORT_CHARACTERS = 4 * 1024
# A conversation of fewer bytes certainly has no more characters than that.
MAX_SHORT_BYTES = _SHORT_CHARACTERS


class Preparer:
    """Renders, encodes and compiles for one checkpoint. Use from one event loop."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        compiler: GrammarCompiler,
        telemetry: Telemetry,
        metrics: Metrics,
        *,
        limits: LimitsConfig,
        turn_cache_tokens: int,
    ) -> None:
        self.checkpoint = checkpoint
        self._prompts = Prompts(checkpoint, limits, turn_cache_tokens=turn_cache_tokens)
        self.tool_call_format = self._prompts.tool_call_format
        self.reasoning_format = self._prompts.reasoning_format
        self._compiler = compiler
        self._telemetry = telemetry
        self._metrics = metrics
        # Tools' schemas are grammars as well.
        self.max_grammar_bytes = limits.max_grammar_bytes
        self._threads = TextThreads()
        self._limits = self._prompts.limits

    async def prepare_conversation(
        self,
        conversation: Conversation,
        form: ResponseFormat | None,
        *,
        tenant: str,
        length: LengthLimit = ANY_LENGTH,
    ) -> Prepared:
        """Raises TEMPLATE_FAILED, GRAMMAR_REFUSED and INVALID_ARGUMENT, REQUEST_TOO_LARGE,
        CONTEXT_LENGTH_EXCEEDED beyond limits.
        """
        self._limits.conversation(conversation, length)
        self._limits.format(form)
        start = time.perf_counter()
        rendered = await self._render(conversation, tenant)
        rendered_at = time.perf_counter()
        token_ids = await self._encode_rendered(rendered, tenant)
        self._limits.length(len(token_ids), length, "messages")
        encoded_at = time.perf_counter()
        prefix = self._prompts.assistant_prefix(conversation, rendered)
        request = self._prompts.grammar_request(conversation, form, prefix)
        compiled, cached = await self._compile(request.encoded() if request else None, tenant)
        return Prepared(
            token_ids=token_ids,
            num_tokens=len(token_ids),
            compiled=compiled,
            grammar_cached=cached,
            assistant_prefix=prefix,
            render_s=rendered_at - start,
            encode_s=encoded_at - rendered_at,
            compile_s=time.perf_counter() - encoded_at if request is not None else 0.0,
        )

    def prepare_short(
        self, conversation: Conversation, *, tenant: str, length: LengthLimit
    ) -> tuple[Prepared, float] | None:
        """The same, now, for a short conversation without tools or format; and the monotonic second at which
        it began, for `tell_short`. None for all others.
        """
        if conversation.tools or num_characters(conversation) >= _SHORT_CHARACTERS:
            return None
        self._limits.conversation(conversation, length)
        begin_s = time.monotonic()
        rendered = self._prompts.templates.render(conversation)
        if len(rendered) >= _SHORT_CHARACTERS:
            return None
        rendered_s = time.monotonic()
        token_ids = self._prompts.encoder.encode_rendered(rendered, tenant=tenant).token_ids
        self._limits.length(len(token_ids), length, "messages")
        encoded_s = time.monotonic()
        prefix = self._prompts.assistant_prefix(conversation, rendered)
        if self._prompts.grammar_request(conversation, None, prefix) is not None:
            return None
        prepared = Prepared(
            token_ids=token_ids,
            num_tokens=len(token_ids),
            compiled=None,
            grammar_cached=False,
            assistant_prefix=prefix,
            render_s=rendered_s - begin_s,
            encode_s=encoded_s - rendered_s,
            compile_s=0.0,
        )
        return prepared, begin_s

    def tell_short(self, prepared: Prepared, begin_s: float, span: Span) -> None:
        """Steps of `span`, and metrics, of what `prepare_short` did."""
        context = span.get_span_context()
        for name, stage, seconds in (
            (names.TOKENIZER_RENDER, "render", prepared.render_s),
            (names.TOKENIZER_ENCODE, "encode", prepared.encode_s),
        ):
            self._telemetry.step(name, of=span, start_s=begin_s, end_s=begin_s + seconds)
            self._metrics.observe(names.TOKENIZER_STAGE_SECONDS, seconds, span=context, stage=stage)
            begin_s += seconds
        self._metrics.observe(names.PROMPT_LENGTH, prepared.num_tokens, span=context)

    def in_debt(self, tenant: str) -> bool:
        """Whether what takes long of this tenant's is for workers of the lowest priority alone."""
        return self._compiler.pool.in_debt(tenant)

    def check_whole(self, num_bytes: int, *, num_messages: int, num_tools: int) -> None:
        """Raises REQUEST_TOO_LARGE for a serialized conversation of so many bytes and parts."""
        self._limits.whole(num_bytes, num_messages, num_tools)

    def check_num_ids(self, num_ids: int, field: str, length: LengthLimit = ANY_LENGTH) -> None:
        """Raises REQUEST_TOO_LARGE or CONTEXT_LENGTH_EXCEEDED for so many token ids."""
        self._limits.num_ids(num_ids, length, field)

    def check_text(self, text: str) -> None:
        """Raises REQUEST_TOO_LARGE for a plain prompt that is too large."""
        self._limits.text(text, ANY_LENGTH, "prompt")

    async def prepare_large(
        self, request: LargeRequest, *, tenant: str, length: LengthLimit = ANY_LENGTH
    ) -> Prepared:
        """The same for a request that is large (see `large`), in a worker."""
        field = self._limits.large(request.input, request.num_input_bytes, request.num_format_bytes, length)
        prompt = PromptRequest(field=field, length=length, tenant=tenant)
        prompted = await self._in_worker(prompt.encoded(request.wire), tenant)
        start = time.perf_counter()
        compiled, cached = await self._compile(prompted.grammar, tenant)
        return Prepared(
            token_ids=prompted.packed_ids,
            num_tokens=prompted.num_tokens,
            compiled=compiled,
            grammar_cached=cached,
            assistant_prefix=prompted.assistant_prefix,
            num_truncated=prompted.num_truncated,
            render_s=prompted.render_s,
            encode_s=prompted.encode_s,
            compile_s=time.perf_counter() - start if prompted.grammar is not None else 0.0,
        )

    async def encode_large(
        self, wire: bytes, *, field: str, add_special_tokens: bool = True, tenant: str
    ) -> memoryview:
        """Packed ids of the prompt in a serialized PrepareRequest, from a worker; errors name `field`."""
        prompt = PromptRequest(field=field, add_special_tokens=add_special_tokens, tenant=tenant)
        return (await self._in_worker(prompt.encoded(wire), tenant)).packed_ids

    async def prepare_text(
        self, text: str, form: ResponseFormat | None, *, tenant: str, length: LengthLimit = ANY_LENGTH
    ) -> Prepared:
        """The same for a plain prompt."""
        self._limits.format(form)
        self._limits.text(text, length, "prompt")
        start = time.perf_counter()
        token_ids = await self.encode_text(text, add_special_tokens=True, tenant=tenant)
        encode_s = time.perf_counter() - start
        return await self._with_grammar(token_ids, form, tenant, length, encode_s=encode_s)

    async def prepare_ids(
        self,
        token_ids: list[int],
        form: ResponseFormat | None,
        *,
        tenant: str,
        length: LengthLimit = ANY_LENGTH,
    ) -> Prepared:
        """The same for a prompt that is encoded already; raises INVALID_ARGUMENT for unknown ids."""
        self._limits.format(form)
        self._limits.ids(token_ids, "prompt")
        return await self._with_grammar(token_ids, form, tenant, length, encode_s=0.0)

    async def encode_conversation(self, conversation: Conversation, *, tenant: str) -> list[int]:
        """Token ids of a rendered conversation."""
        self._limits.conversation(conversation, ANY_LENGTH)
        return await self._encode_rendered(await self._render(conversation, tenant), tenant)

    async def encode_text(self, text: str, *, add_special_tokens: bool, tenant: str = "") -> list[int]:
        """Token ids of a plain prompt."""
        self._limits.text(text, ANY_LENGTH, "prompt")
        encoder = self._prompts.encoder
        with self._stage(names.TOKENIZER_ENCODE, "encode"):
            return await self._threads.run(
                len(text), lambda: encoder.encode_text(text, add_special_tokens=add_special_tokens), tenant
            )

    async def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of several plain prompts."""
        size = self._limits.batch(texts, "texts")
        encoder = self._prompts.encoder
        with self._stage(names.TOKENIZER_ENCODE, "encode"):
            return await self._threads.run(
                size, lambda: encoder.encode_batch(texts, add_special_tokens=add_special_tokens), ""
            )

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    async def decode(self, token_ids: list[int]) -> str:
        """Text of token ids; raises INVALID_ARGUMENT for unknown ids."""
        self._limits.ids(token_ids, "token_ids")
        vocabulary = self.checkpoint.vocabulary
        return await self._threads.run(len(token_ids), lambda: vocabulary.text(token_ids), "")

    def observe_length(self, num_tokens: int) -> None:
        """Counts a prompt that was prepared."""
        self._metrics.observe(names.PROMPT_LENGTH, num_tokens)

    async def compile_format(self, form: ResponseFormat, *, tenant: str) -> tuple[Compiled, bool]:
        """Grammar of a response format alone, and whether it was cached."""
        self._limits.format(form)
        return await self._compiler.compile(GrammarRequest(response_format=form).encoded(), tenant=tenant)

    async def validate(self, schema_json: str, texts: list[str], *, tenant: str) -> tuple[Verdict, ...]:
        """One verdict per finished text; raises GRAMMAR_REFUSED when the schema cannot judge."""
        self._limits.grammar_size(len(schema_json), "schema_json")
        self._limits.batch(texts, "texts")
        return await self._compiler.validate(schema_json, tuple(texts), tenant=tenant)

    async def _with_grammar(
        self,
        token_ids: list[int],
        form: ResponseFormat | None,
        tenant: str,
        length: LengthLimit,
        *,
        encode_s: float,
    ) -> Prepared:
        num_tokens = len(token_ids)
        if length.truncation is not Truncation.REFUSE:
            token_ids = self._prompts.encoder.truncated(
                token_ids, self._limits.max_tokens(length), length.truncation
            )
        self._limits.length(len(token_ids), length, "prompt")
        start = time.perf_counter()
        request = GrammarRequest(response_format=form).encoded() if form is not None else None
        compiled, cached = await self._compile(request, tenant)
        return Prepared(
            token_ids=token_ids,
            num_tokens=len(token_ids),
            compiled=compiled,
            grammar_cached=cached,
            assistant_prefix="",
            render_s=0.0,
            encode_s=encode_s,
            num_truncated=num_tokens - len(token_ids),
            compile_s=time.perf_counter() - start if request is not None else 0.0,
        )

    async def _render(self, conversation: Conversation, tenant: str) -> str:
        templates = self._prompts.templates
        with self._stage(names.TOKENIZER_RENDER, "render"):
            return await self._threads.run(
                num_characters(conversation), lambda: templates.render(conversation), tenant
            )

    async def _encode_rendered(self, rendered: str, tenant: str) -> list[int]:
        encoder = self._prompts.encoder
        with self._stage(names.TOKENIZER_ENCODE, "encode"):
            encoded = await self._threads.run(
                len(rendered), lambda: encoder.encode_rendered(rendered, tenant=tenant), tenant
            )
        return encoded.token_ids

    async def _in_worker(self, request: EncodedPrompt, tenant: str) -> Prompted:
        reply = await self._compiler.pool.run(request, tenant=tenant)
        if reply.prompted is None:
            assert reply.refused is not None
            raise refusal(reply.refused)
        if reply.prompted.render_s:
            self._metrics.observe(names.TOKENIZER_STAGE_SECONDS, reply.prompted.render_s, stage="render")
        self._metrics.observe(names.TOKENIZER_STAGE_SECONDS, reply.prompted.encode_s, stage="encode")
        return reply.prompted

    async def _compile(self, request: EncodedGrammar | None, tenant: str) -> tuple[Compiled | None, bool]:
        if request is None:
            return None, False
        started_s = time.perf_counter()
        with self._stage(names.TOKENIZER_COMPILE, "compile") as stage:
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
            stage.attributes = {names.GRAMMAR_CACHE: result, names.GRAMMAR_DIGEST: compiled.artifact.digest}
            self._metrics.add(names.GRAMMAR_LOOKUPS, result=result)
        return compiled, cached

    def _stage(self, span: SpanName, stage: str) -> _Stage:
        return _Stage(self._telemetry, self._metrics, span, stage)


class _Stage:
    """A step of the current span with the stage's time in the metrics."""

    __slots__ = ("_metrics", "_name", "_stage", "_start_s", "_telemetry", "attributes")

    def __init__(self, telemetry: Telemetry, metrics: Metrics, name: SpanName, stage: str) -> None:
        self._telemetry = telemetry
        self._metrics = metrics
        self._name = name
        self._stage = stage
        self.attributes: Attributes = {}

    def __enter__(self) -> _Stage:
        self._start_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end_s = time.monotonic()
        self._metrics.observe(names.TOKENIZER_STAGE_SECONDS, end_s - self._start_s, stage=self._stage)
        self._telemetry.step(
            self._name,
            of=trace.get_current_span(),
            start_s=self._start_s,
            end_s=end_s,
            attributes=self.attributes,
            error=kind.__name__ if kind is not None else "",
        )
