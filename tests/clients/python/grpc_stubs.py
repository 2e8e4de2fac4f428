"""Stubs that another team generates from proto/ alone, with the line of docs/reference.md."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from report import ADDRESS, ANSWER, API_KEY, LIMITED_KEY, MODEL, OUT, QUESTION, ROOT, TOO_LONG, refused, works

STUBS = OUT / "stubs"
METADATA = (("authorization", f"Bearer {API_KEY}"),)


class Refusal(Exception):
    """An RPC error with its reason, fields and retry delay."""


def generate() -> None:
    """The stubs, from the folder of protos and nothing else of the repository."""
    STUBS.mkdir()
    lines = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in lines if each.startswith("python -m grpc_tools.protoc -Iproto ")]
    command = f"{sys.executable} {line.removeprefix('python ')}".replace("_out=.", f"_out={STUBS}")
    subprocess.run(["bash", "-c", command], cwd=ROOT, check=True)


with works("stubs from proto/"):
    generate()
sys.path.insert(0, str(STUBS))
chat = importlib.import_module("millrace.common.v1.chat_pb2")
sampling = importlib.import_module("millrace.common.v1.sampling_pb2")
inference = importlib.import_module("millrace.inference.v1.inference_pb2")
service = importlib.import_module("millrace.inference.v1.inference_pb2_grpc")

channel = grpc.insecure_channel(ADDRESS)
stub = service.InferenceServiceStub(channel)


def request(text: str = QUESTION, **options: object) -> object:
    """A chat."""
    message = chat.Message(role=chat.ROLE_USER, content=text)
    greedy = sampling.SamplingOptions(temperature=0, max_tokens=60)
    options = {"model": MODEL, "sampling": greedy, **options}
    return inference.ChatRequest(conversation=chat.Conversation(messages=[message]), **options)


def ask(asked: object, key: str = API_KEY) -> list:
    """All messages of a stream; raises Refusal with what the status says in detail."""
    try:
        return list(stub.Chat(asked, metadata=(("authorization", f"Bearer {key}"),), timeout=60))
    except grpc.RpcError as error:
        told = {"code": error.code().name, "message": error.details()}
        for detail in rpc_status.from_call(error).details:
            for kind in (
                error_details_pb2.ErrorInfo,
                error_details_pb2.BadRequest,
                error_details_pb2.RetryInfo,
            ):
                if detail.Is(kind.DESCRIPTOR):
                    detail.Unpack(found := kind())
                    told[kind.__name__] = str(found)
        raise Refusal(json.dumps(told)) from error


def text_of(responses: list) -> str:
    """The answer."""
    return "".join(choice.content for each in responses for choice in each.choices)


with works("chat as a stream"):
    answered = ask(request())
    assert ANSWER in text_of(answered)
    assert answered[-1].usage.completion_tokens > 0
with works("tools"):
    parameters = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
    tool = chat.Tool(name="get_weather", description="Get the weather in a city", parameters_json=parameters)
    asked = request("What is the weather in Paris?")
    asked.conversation.tools.append(tool)
    asked.conversation.tool_choice.mode = chat.TOOL_CHOICE_MODE_REQUIRED
    calls = [call for each in ask(asked) for choice in each.choices for call in choice.tool_calls]
    assert json.loads("".join(call.arguments_json for call in calls))["city"]
with works("structured output"):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    format_ = chat.ResponseFormat(json_schema=chat.JsonSchema(schema_json=json.dumps(schema)))
    assert "age" in json.loads(text_of(ask(request(response_format=format_))))
with works("tokens and models"):
    text = inference.TokenizeRequest(model=MODEL, text="hello")
    ids = stub.Tokenize(text, metadata=METADATA).token_ids
    back = stub.Detokenize(inference.DetokenizeRequest(model=MODEL, token_ids=ids), metadata=METADATA)
    assert back.text == "hello", back
    assert stub.ListModels(inference.ListModelsRequest(), metadata=METADATA).models
with works("fields of a later version"):
    # Field 1000, a varint.
    later = inference.ChatRequest.FromString(request().SerializeToString() + b"\xc0\x3e\x01")
    assert ANSWER in text_of(ask(later))
with works("a deadline"):
    options = sampling.SamplingOptions(max_tokens=3000, ignore_eos=True)
    call = stub.Chat(request(sampling=options), metadata=METADATA, timeout=0.3)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED, call.code()
with refused("context too long", Refusal, "CONTEXT_LENGTH_EXCEEDED"):
    ask(request(TOO_LONG))
with refused("unknown model", Refusal, "MODEL_NOT_FOUND"):
    ask(request(model="nobody"))
with refused("wrong key", Refusal, "INVALID_CREDENTIALS"):
    ask(request(), "mr-wrong")
with refused("too many requests", Refusal, "RetryInfo"):
    for _ in range(2):
        ask(request(), LIMITED_KEY)
