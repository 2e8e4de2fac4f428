"""A tokenizer service that encodes bytes and renders conversations as `role: content` lines."""

from __future__ import annotations

from typing import Any

from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from contract.errors import MillraceError, Reason
from contract.proto.status import to_detail
from tests.unit.gateway.rig.vocabulary import END_ID, FINGERPRINT, SPECIAL_IDS, TOKENS, encode


class ByteTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Keeps what it was asked, so that tests can look at it."""

    def __init__(self) -> None:
        self.prepared: list[tokenizer_pb2.PrepareRequest] = []
        self.generation_config = ""
        self.tool_call_format = "hermes"
        self.reasoning_format = "think"
        self.assistant_prefix = ""
        # What is put before a plain text, unless the request says that nothing is added.
        self.start_ids: list[int] = []

    async def GetVocabulary(self, request: Any, context: Any) -> Any:
        return tokenizer_pb2.GetVocabularyResponse(
            fingerprint=FINGERPRINT,
            decoder=tokenizer_pb2.DECODER_KIND_BYTE_LEVEL,
            tokens=TOKENS,
            special_ids=SPECIAL_IDS,
            eos_token_ids=[END_ID],
            tool_call_format=self.tool_call_format,
            reasoning_format=self.reasoning_format,
            generation_config_json=self.generation_config,
        )

    async def Prepare(self, request: Any, context: Any) -> Any:
        self.prepared.append(request)
        response = tokenizer_pb2.PrepareResponse(
            vocabulary_fingerprint=FINGERPRINT, assistant_prefix=self.assistant_prefix
        )
        response.token_ids.extend(self._ids(request))
        if request.HasField("response_format"):
            if "impossible" in request.response_format.json_schema.schema_json:
                raise MillraceError(
                    Reason.GRAMMAR_REFUSED, "response_format: no such type", field="response_format"
                )
            response.grammar.digest = "d"
            response.grammar.payload = b"grammar"
        return response

    async def PrepareStream(self, requests: Any, context: Any) -> Any:
        async for message in requests:
            answers = [await self._answer(call, context) for call in message.calls]
            yield tokenizer_pb2.PrepareStreamResponse(answers=answers)

    async def _answer(self, call: Any, context: Any) -> Any:
        try:
            response = await self.Prepare(call.request, context)
        except MillraceError as error:
            return tokenizer_pb2.PrepareAnswer(id=call.id, error=to_detail(error))
        return tokenizer_pb2.PrepareAnswer(id=call.id, response=response)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        adds = request.add_special_tokens or not request.HasField("add_special_tokens")
        return tokenizer_pb2.TokenizeResponse(token_ids=self._ids(request, adds=adds))

    def _ids(self, request: Any, *, adds: bool = True) -> list[int]:
        match request.WhichOneof("input"):
            case "encoded":
                return list(request.encoded.ids)
            case "text":
                return [*(self.start_ids if adds else ()), *encode(request.text)]
            case _:
                lines = [f"{turn.role}: {turn.content}\n" for turn in request.conversation.messages]
                return encode("".join(lines))
