"""The gRPC face: verifies who asks, checks the model's name, translates."""

from __future__ import annotations

import time
from typing import Any

from millrace.common.v1 import context_pb2
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from opentelemetry import context as otel_context

from observability import names
from observability.tracing import RequestIdentity, Telemetry, with_identity
from services.config import ModelConfig
from services.context import verify
from services.errors import MillraceError, Reason
from tokenizer_svc import convert
from tokenizer_svc.prepare import Preparer
from tokenizer_svc.types import EnforcementReport, JsonSchemaFormat, Prepared

SERVICE_NAME = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves one checkpoint under its name and aliases."""

    def __init__(
        self,
        preparer: Preparer,
        model: ModelConfig,
        telemetry: Telemetry,
        *,
        secret: bytes,
        max_context_age_s: float,
        allow_unsigned: bool,
    ) -> None:
        self._preparer = preparer
        self._model = model
        self._names = frozenset({"", model.served_name, *model.aliases})
        self._telemetry = telemetry
        self._secret = secret
        self._max_context_age_s = max_context_age_s
        self._allow_unsigned = allow_unsigned
        self._vocabulary = convert.vocabulary_response(
            preparer.checkpoint, preparer.tool_call_format, preparer.reasoning_format
        )

    async def Prepare(
        self, request: tokenizer_pb2.PrepareRequest, context: Any
    ) -> tokenizer_pb2.PrepareResponse:
        """See the proto."""
        who = self._verify(request)
        self._check_model(request.model, who)
        identity = RequestIdentity(who.request_id, who.client_request_id, who.tenant, who.tier)
        token = otel_context.attach(with_identity(identity))
        try:
            with self._telemetry.span(names.TOKENIZER_PREPARE):
                prepared = await self._prepare(request, who.tenant)
            self._preparer.observe_length(len(prepared.token_ids))
        finally:
            otel_context.detach(token)
        return convert.prepare_response(prepared, self._vocabulary.fingerprint)

    async def _prepare(self, request: tokenizer_pb2.PrepareRequest, tenant: str) -> Prepared:
        form = convert.response_format(request.response_format)
        match request.WhichOneof("input"):
            case "conversation":
                conversation = convert.conversation(request.conversation)
                return await self._preparer.prepare_conversation(conversation, form, tenant=tenant)
            case "text":
                return await self._preparer.prepare_text(request.text, form, tenant=tenant)
            case "encoded":
                return await self._preparer.prepare_ids(list(request.encoded.ids), form, tenant=tenant)
        raise _no_input()

    async def GetVocabulary(
        self, request: tokenizer_pb2.GetVocabularyRequest, context: Any
    ) -> tokenizer_pb2.GetVocabularyResponse:
        """See the proto."""
        self._check_model(request.model)
        return self._vocabulary

    async def Tokenize(
        self, request: tokenizer_pb2.TokenizeRequest, context: Any
    ) -> tokenizer_pb2.TokenizeResponse:
        """See the proto."""
        self._check_model(request.model)
        match request.WhichOneof("input"):
            case "conversation":
                conversation = convert.conversation(request.conversation)
                ids = await self._preparer.encode_conversation(conversation, tenant="")
            case "text":
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await self._preparer.encode_text(request.text, add_special_tokens=special)
            case _:
                raise _no_input()
        return tokenizer_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: tokenizer_pb2.DetokenizeRequest, context: Any
    ) -> tokenizer_pb2.DetokenizeResponse:
        """See the proto."""
        self._check_model(request.model)
        return tokenizer_pb2.DetokenizeResponse(text=self._preparer.decode(list(request.token_ids)))

    async def CheckSchema(
        self, request: tokenizer_pb2.CheckSchemaRequest, context: Any
    ) -> tokenizer_pb2.CheckSchemaResponse:
        """See the proto."""
        self._check_model(request.model)
        form = convert.response_format(request.response_format)
        if form is None:
            raise MillraceError(
                Reason.INVALID_ARGUMENT, "response_format is not set", field="response_format"
            )
        start = time.perf_counter()
        report: EnforcementReport | None = None
        accepted_strict = accepted = False
        refusal = ""
        strict_form = JsonSchemaFormat(form.schema_json) if isinstance(form, JsonSchemaFormat) else form
        try:
            compiled, _ = await self._preparer.compile_format(strict_form, tenant="")
            accepted_strict = accepted = True
            report = compiled.enforcement
        except MillraceError as error:
            if error.reason is not Reason.GRAMMAR_REFUSED:
                raise
            refusal = error.message
        if not accepted and isinstance(form, JsonSchemaFormat):
            try:
                compiled, _ = await self._preparer.compile_format(
                    JsonSchemaFormat(form.schema_json, strict=False), tenant=""
                )
                accepted, report = True, compiled.enforcement
            except MillraceError as error:
                if error.reason is not Reason.GRAMMAR_REFUSED:
                    raise
        return tokenizer_pb2.CheckSchemaResponse(
            accepted_strict=accepted_strict,
            accepted=accepted,
            enforcement=convert.enforcement(report) if report is not None else None,
            refusal=refusal,
            compile_s=time.perf_counter() - start,
        )

    def _verify(self, request: tokenizer_pb2.PrepareRequest) -> context_pb2.RequestContext:
        if request.HasField("context"):
            return verify(
                request.context,
                self._secret,
                now_unix_ms=round(time.time() * 1000),
                max_age_s=self._max_context_age_s,
            )
        if self._allow_unsigned:
            return context_pb2.RequestContext()
        raise MillraceError(
            Reason.CONTEXT_SIGNATURE_INVALID,
            "there is no signed request context; send requests through the gateway's edge, which signs them, "
            "or set tokenizer.allow_unsigned",
            field="context",
        )

    def _check_model(self, name: str, who: context_pb2.RequestContext | None = None) -> None:
        if name not in self._names:
            raise MillraceError(
                Reason.MODEL_NOT_FOUND,
                f"model {name!r} is not served; ask for {self._model.served_name!r}",
                field="model",
            )
        allowed = tuple(who.allowed_models) if who is not None else ()
        if allowed and name and self._model.served_name not in allowed and name not in allowed:
            raise MillraceError(
                Reason.MODEL_NOT_ALLOWED,
                f"this key may not use {name!r}; it may use {', '.join(allowed)}",
                field="model",
            )


def _no_input() -> MillraceError:
    return MillraceError(
        Reason.INVALID_ARGUMENT, "there is no input; set messages, a text or token ids", field="input"
    )
