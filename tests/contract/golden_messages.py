"""One message of every kind that crosses a process border, filled with values that exercise presence.

`python -m tests.contract.golden_messages`, which `make proto` runs, adds what is new to the files beside this
one. It takes nothing away: a field or a byte that disappears or changes breaks deployed clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from millrace.common.v1 import (
    chat_pb2,
    context_pb2,
    error_pb2,
    grammar_pb2,
    output_pb2,
    sampling_pb2,
)
from millrace.engine.v1 import engine_pb2
from millrace.inference.v1 import inference_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

HERE = Path(__file__).resolve().parent
WIRE_FILE = HERE / "wire_bytes.txt"
FIELDS_FILE = HERE / "proto_fields.txt"

_FILES = (
    chat_pb2,
    context_pb2,
    error_pb2,
    grammar_pb2,
    output_pb2,
    sampling_pb2,
    engine_pb2,
    inference_pb2,
    tokenizer_pb2,
)


_SAMPLING = sampling_pb2.SamplingOptions(
    temperature=0.0, top_k=0, top_p=0.5, seed=0, max_tokens=16, stop=["\n"], n=1, logprobs=0
)
_SIGNED = context_pb2.SignedContext(payload=b"payload", signature=b"\x01\x02")
_GRAMMAR = grammar_pb2.GrammarArtifact(digest="ab", payload=b"\x00", backend="llguidance/1")


def messages() -> dict[str, Message]:
    """Messages by a name that says what they are."""
    return {**_shared(), **_public(), **_internal()}


def _shared() -> dict[str, Message]:
    return {
        "conversation": _conversation(),
        "request_context": context_pb2.RequestContext(
            request_id="r-1",
            tenant="acme",
            key_id="k1",
            tier="interactive",
            priority=-1,
            weight=0.5,
            ttft_target_ms=0,
            deadline_unix_ms=1_700_000_000_000,
            cache_salt=b"\x00\xff",
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            issued_unix_ms=1_700_000_000_001,
            allowed_models=["a", "b"],
        ),
        "signed_context": _SIGNED,
        "sampling_options": _SAMPLING,
        "grammar_artifact": _GRAMMAR,
        "error_detail": error_pb2.ErrorDetail(reason="DRAINING", message="later", retry_after_s=0.0),
    }


def _conversation() -> chat_pb2.Conversation:
    call = chat_pb2.ToolCall(id="c1", name="add", arguments_json='{"a":1}')
    options = Struct()
    options.update({"enable_thinking": True})
    return chat_pb2.Conversation(
        messages=[
            chat_pb2.Message(role=chat_pb2.ROLE_SYSTEM, content="Be brief."),
            chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, tool_calls=[call]),
            chat_pb2.Message(role=chat_pb2.ROLE_TOOL, content="ü", tool_call_id="c1"),
        ],
        tools=[chat_pb2.Tool(name="add", parameters_json="{}", strict=False)],
        tool_choice=chat_pb2.ToolChoice(mode=chat_pb2.TOOL_CHOICE_MODE_NAMED, name="add"),
        parallel_tool_calls=False,
        template_options=options,
    )


def _public() -> dict[str, Message]:
    schema = chat_pb2.JsonSchema(name="s", schema_json="{}", strict=True)
    finished = inference_pb2.ChatChoice(
        index=1, content="hé", finish_reason=output_pb2.FINISH_REASON_STOP, stop_reason=""
    )
    return {
        "chat_request": inference_pb2.ChatRequest(
            model="m",
            conversation=_conversation(),
            sampling=_SAMPLING,
            response_format=chat_pb2.ResponseFormat(json_schema=schema),
            service_tier="auto",
            include_timing=True,
            metadata={"a": "b"},
        ),
        "chat_response": inference_pb2.ChatResponse(
            request_id="r-1",
            choices=[finished],
            usage=output_pb2.Usage(prompt_tokens=3, completion_tokens=2),
        ),
        "generate_request_ids": inference_pb2.GenerateRequest(
            model="m", token_ids=inference_pb2.TokenIds(ids=[0, 1, 300])
        ),
    }


def _internal() -> dict[str, Message]:
    submit = engine_pb2.Submit(
        handle=7,
        context=_SIGNED,
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[4],
        sampling=_SAMPLING,
        grammar=_GRAMMAR,
        choice_index=2,
    )
    failed = engine_pb2.RequestOutput(
        handle=8,
        finish_reason=output_pb2.FINISH_REASON_ERROR,
        error=error_pb2.ErrorDetail(reason="STEP_FAILED"),
    )
    stored = engine_pb2.BlocksStored(block_hashes=[1, 2**64 - 1], parent_hash=3)
    outputs = engine_pb2.StepOutputs(
        step_id=9,
        outputs=[engine_pb2.RequestOutput(handle=7, token_ids=[5, 6], stop_token_id=0), failed],
        load=engine_pb2.EngineLoad(num_running=2, num_free_blocks=10, draining=True),
        kv_events=[engine_pb2.KvEvent(stored=stored)],
    )
    cancel = engine_pb2.Cancel(handle=7, reason=engine_pb2.CANCEL_REASON_DEADLINE)
    return {
        "prepare_request": tokenizer_pb2.PrepareRequest(
            context=_SIGNED, model="m", conversation=_conversation()
        ),
        "prepare_response": tokenizer_pb2.PrepareResponse(token_ids=[1, 2, 70_000], grammar=_GRAMMAR),
        "attach_submit": engine_pb2.AttachRequest(submit=submit),
        "attach_cancel": engine_pb2.AttachRequest(cancel=cancel),
        "attach_outputs": engine_pb2.AttachResponse(outputs=outputs),
    }


def wire_lines() -> list[str]:
    """`name hex` of every message."""
    return [
        f"{name} {message.SerializeToString(deterministic=True).hex()}"
        for name, message in messages().items()
    ]


def field_lines() -> list[str]:
    """`message.field number type label` of every field, `enum.VALUE number` of every value, and request and
    answer of every method.
    """
    return sorted(line for module in _FILES for line in lines_of(module.DESCRIPTOR))


def broken_promises(promised: Iterable[str], present: Iterable[str]) -> list[str]:
    """A sentence for each promised line that is gone or differs: what a deployed client would misread."""
    now = dict(line.split(" ", 1) for line in present)
    sentences = []
    for name, was in (line.split(" ", 1) for line in promised):
        if name not in now:
            sentences.append(f"{name} was removed, which had been: {was}")
        elif now[name] != was:
            sentences.append(f"{name} was changed from: {was}, to: {now[name]}")
    return sentences


def lines_of(file: FileDescriptor) -> Iterator[str]:
    """The lines of one file."""
    for enum in file.enum_types_by_name.values():
        for value in enum.values:
            yield f"{enum.full_name}.{value.name} {value.number}"
    for message in file.message_types_by_name.values():
        yield from _of_message(message)
    for service in file.services_by_name.values():
        for method in service.methods:
            kinds = f"{_stream(method.client_streaming)}{method.input_type.full_name}"
            yield f"{service.full_name}.{method.name} {kinds} -> {_stream(method.server_streaming)}" + (
                method.output_type.full_name
            )


def _of_message(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        label = "repeated" if field.is_repeated else "presence" if field.has_presence else "plain"
        yield f"{field.full_name} {field.number} {kind.full_name if kind else field.type} {label}"
    for nested in message.nested_types:
        yield from _of_message(nested)


def _stream(streaming: bool) -> str:
    return "stream " if streaming else ""


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def main() -> None:
    """Adds new fields and the bytes of new messages to the golden files."""
    fields = sorted({*_lines(FIELDS_FILE), *field_lines()})
    FIELDS_FILE.write_text("\n".join(fields) + "\n", encoding="utf-8")
    wire = dict(line.split(" ", 1) for line in wire_lines())
    wire |= dict(line.split(" ", 1) for line in _lines(WIRE_FILE))
    WIRE_FILE.write_text("".join(f"{name} {data}\n" for name, data in wire.items()), encoding="utf-8")


if __name__ == "__main__":
    main()
