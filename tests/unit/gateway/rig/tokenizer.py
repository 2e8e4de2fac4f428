"""A tokenizer service that encodes bytes and renders conversations as `role: content` lines."""

from __future__ import annotations

from typing import Any

from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from contract.chat import turns_of, without_oldest
from contract.errors import MillraceError, Reason, context_length
from contract.grammar import EnforcementReport
from contract.proto import chat
from contract.proto.grammar import report_message
from contract.proto.status import to_detail
from tests.unit.gateway.rig.vocabulary import END_ID, FINGERPRINT, SPECIAL_IDS, TOKENS, encode


class ByteTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Keeps what it was asked, so that tests can look at it."""

    def __init__(self) -> None:
        self.prepared: list[tokenizer_pb2.PrepareRequest] = []
        self.generation_config = ""
        self.sampling_sources: dict[str, str] = {}
        self.tool_call_format = "hermes"
        self.reasoning_format = "think"
        self.takes_effort = False
        self.assistant_prefix = ""
        self.enforcement: EnforcementReport | None = None
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
            sampling_sources=self.sampling_sources,
            takes_effort=self.takes_effort,
        )

    async def Prepare(self, request: Any, context: Any) -> Any:
        self.prepared.append(request)
        response = tokenizer_pb2.PrepareResponse(
            vocabulary_fingerprint=FINGERPRINT, assistant_prefix=self.assistant_prefix
        )
        self._fill(response, request)
        if self.enforcement is not None:
            response.enforcement.CopyFrom(report_message(self.enforcement))
        if request.HasField("response_format"):
            if "impossible" in request.response_format.json_schema.schema_json:
                raise MillraceError(
                    Reason.GRAMMAR_REFUSED, "response_format: no such type", field="response_format"
                )
            response.grammar.digest = "d"
            response.grammar.payload = b"grammar"
        for index, tool in enumerate(request.conversation.tools):
            _compile(response, tool.parameters_json, index)
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
        response = tokenizer_pb2.TokenizeResponse()
        self._fill(response, request)
        return response

    def _fill(self, response: Any, request: Any) -> None:
        """Ids, cut where the request says so; of a conversation one turn after the other is left out."""
        ids = self._ids(request)
        num_tokens, cuts = len(ids), request.truncation == tokenizer_pb2.TRUNCATION_KEEP_END
        most = request.max_prompt_tokens if request.HasField("max_prompt_tokens") and cuts else num_tokens
        if request.HasField("conversation"):
            whole = chat.conversation(request.conversation)
            num_turns, num_out = len(turns_of(whole.messages)), 0
            while len(ids) > most and num_out < num_turns - 1:
                num_out += 1
                fields = chat.conversation_fields(without_oldest(whole, num_out))
                request.conversation.CopyFrom(chat_pb2.Conversation(**fields))
                ids = self._ids(request)
            if len(ids) > most:
                raise MillraceError(
                    Reason.CONTEXT_LENGTH_EXCEEDED,
                    context_length(most, f"the prompt has {len(ids)} tokens; shorten the prompt"),
                    field="conversation.messages",
                    metadata={"prompt_tokens": str(len(ids)), "max_context_tokens": str(most)},
                )
            if num_out:
                response.num_truncated_turns, response.num_turns = num_out, num_turns
        else:
            ids = ids[num_tokens - min(most, num_tokens) :]
        response.num_truncated_tokens = num_tokens - len(ids)
        response.token_ids.extend(ids)

    def _ids(self, request: Any) -> list[int]:
        adds = request.add_special_tokens or not request.HasField("add_special_tokens")
        match request.WhichOneof("input"):
            case "encoded":
                return list(request.encoded.ids)
            case "text":
                return [*(self.start_ids if adds else ()), *encode(request.text)]
            case _:
                lines = [f"{turn.role}: {turn.content}\n" for turn in request.conversation.messages]
                return encode("".join(lines))


def _compile(response: Any, schema: str, index: int) -> None:
    """A tool's schema: one that is impossible is refused, a reference to nowhere not enforced."""
    if "impossible" in schema:
        field = f"conversation.tools[{index}].function.parameters"
        raise MillraceError(Reason.GRAMMAR_REFUSED, f"{field}: no such type", field=field)
    if "#/nowhere" in schema:
        path = f"/tools/{index}/parameters/properties/a/$ref"
        response.enforcement.unenforced.add(keyword="$ref", path=path, note="it leads nowhere")
