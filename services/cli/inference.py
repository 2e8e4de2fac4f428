"""Calls to the gRPC face, for `chat`, `generate` and `models`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import grpc
from millrace.common.v1 import chat_pb2, sampling_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from services.channels import CLIENT_OPTIONS
from services.cli.target import Target
from services.errors import ConfigError


class InferenceClient:
    """A blocking client of one server; failures are raised as MillraceError."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channel = grpc.insecure_channel(target.address, options=CLIENT_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> InferenceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def models(self) -> Sequence[inference_pb2.Model]:
        """Models that the key may use."""
        with _translated(self._target):
            answer = self._stub.ListModels(inference_pb2.ListModelsRequest(), metadata=self._target.metadata)
        return list(answer.models)

    def default_model(self) -> str:
        """Name of the model to ask for when the user names none."""
        if self._target.model:
            return self._target.model
        models = self.models()
        if not models:
            raise MillraceError(Reason.MODEL_NOT_FOUND, "the server lists no model that this key may use")
        return str(models[0].id)

    def chat(self, request: inference_pb2.ChatRequest) -> Iterator[inference_pb2.ChatResponse]:
        """Streams an answer; closing the iterator cancels it."""
        call: Any = self._stub.Chat(request, metadata=self._target.metadata)
        try:
            with _translated(self._target):
                yield from call
        finally:
            call.cancel()

    def generate(self, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateResponse]:
        """Streams a continuation; closing the iterator cancels it."""
        call: Any = self._stub.Generate(request, metadata=self._target.metadata)
        try:
            with _translated(self._target):
                yield from call
        finally:
            call.cancel()


@contextmanager
def _translated(target: Target) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raised = from_rpc_error(error, unavailable=Reason.ENGINE_UNAVAILABLE)
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            raised.message = f"{target.address}: {raised.message}"
        raise raised from error


def sampling_options(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: Sequence[str],
) -> sampling_pb2.SamplingOptions:
    """Options of the command line; what is None keeps the model's default."""
    options = sampling_pb2.SamplingOptions(stop=stop)
    for name, value in {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
    }.items():
        if value is not None:
            setattr(options, name, value)
    return options


def message(role: chat_pb2.Role.ValueType, content: str) -> chat_pb2.Message:
    """One turn of a conversation."""
    return chat_pb2.Message(role=role, content=content)


def response_format(schema_json: str, regex: str) -> chat_pb2.ResponseFormat:
    """The constraint of the command line; raises ConfigError when there are two."""
    if schema_json and regex:
        raise ConfigError("--schema and --regex exclude each other; give one of them")
    if schema_json:
        return chat_pb2.ResponseFormat(
            json_schema=chat_pb2.JsonSchema(name="answer", schema_json=schema_json)
        )
    if regex:
        return chat_pb2.ResponseFormat(regex=regex)
    return chat_pb2.ResponseFormat()


def generate_to(
    client: InferenceClient,
    out: TextIO,
    *,
    model: str,
    prompt: str,
    sampling: sampling_pb2.SamplingOptions,
    response_format: chat_pb2.ResponseFormat,
    service_tier: str,
) -> None:
    """Streams the continuation of `prompt` to `out`."""
    request = inference_pb2.GenerateRequest(
        model=model,
        text=prompt,
        sampling=sampling,
        response_format=response_format,
        service_tier=service_tier,
    )
    for response in client.generate(request):
        for choice in response.choices:
            out.write(choice.text)
            out.flush()
    out.write("\n")
