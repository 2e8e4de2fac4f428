"""Calls to the gRPC face, for `chat`, `generate` and `models`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from contract.errors import MillraceError, Reason
from contract.pooling import GENERATE
from contract.proto.status import from_rpc_error
from runtime.channels import CLIENT_OPTIONS
from runtime.errors import ConfigError
from services.cli.target import ServerTarget

# Where OpenSSL's programs, and so most clients, find authorities besides the usual ones.
_AUTHORITIES_VARIABLE = "SSL_CERT_FILE"


class InferenceClient:
    """A blocking client of one server; failures are raised as MillraceError."""

    def __init__(self, target: ServerTarget) -> None:
        self._target = target
        self._channel = _channel(target)
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

    def model(self, name: str) -> inference_pb2.Model | None:
        """What the server says of a model; None where it lists none of that name."""
        return next((each for each in self.models() if each.id == name), None)

    def default_model(self) -> str:
        """Name of the model to ask for when the user names none."""
        if self._target.model:
            return self._target.model
        models = self.models()
        if not models:
            raise MillraceError(Reason.MODEL_NOT_FOUND, "the server lists no model that this key may use")
        return str(models[0].id)

    def chat(self, **fields: Any) -> Generator[inference_pb2.ChatResponse, None, None]:
        """Streams an answer; closing the iterator cancels it."""
        request = inference_pb2.ChatRequest(**fields)
        return self._stream(self._stub.Chat(request, metadata=self._target.metadata))

    def generate(self, **fields: Any) -> Generator[inference_pb2.GenerateResponse, None, None]:
        """Streams a continuation; closing the iterator cancels it."""
        request = inference_pb2.GenerateRequest(**fields)
        return self._stream(self._stub.Generate(request, metadata=self._target.metadata))

    def _stream(self, call: Any) -> Generator[Any, None, None]:
        try:
            with _translated(self._target):
                yield from call
        finally:
            call.cancel()


def _channel(target: ServerTarget) -> grpc.Channel:
    """With TLS where the url says https: a key is not sent in clear to a server that was named so."""
    if not target.url.startswith("https://"):
        return grpc.insecure_channel(target.address, options=CLIENT_OPTIONS)
    named = os.environ.get(_AUTHORITIES_VARIABLE, "")
    try:
        authorities = Path(named).read_bytes() if named else None
    except OSError as error:
        raise ConfigError(f"{_AUTHORITIES_VARIABLE}: {error}") from error
    return grpc.secure_channel(
        target.address, grpc.ssl_channel_credentials(authorities), options=CLIENT_OPTIONS
    )


def told_model(model: inference_pb2.Model) -> str:
    """A model, the longest text that it takes, and what it can do where that is not to generate, in one line.
    The length is known while an engine has it loaded.
    """
    length = f"{model.max_model_len} tokens" if model.max_model_len else "not loaded"
    tasks = ", ".join(each for each in model.tasks if each != GENERATE)
    return "  ".join(filter(None, (model.id, length, tasks)))


def told_defaults(model: inference_pb2.Model | None, asked: Mapping[str, Any]) -> str:
    """The sampling options that a model has of its own and that nobody `asked` otherwise, in one line."""
    by_source: dict[str, list[str]] = {}
    for each in () if model is None else model.sampling_defaults:
        if asked.get(each.option) is None:
            by_source.setdefault(each.source, []).append(f"{each.option} {each.value:g}")
    return "; ".join(f"{', '.join(options)} ({source})" for source, options in by_source.items())


@contextmanager
def _translated(target: ServerTarget) -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raised = from_rpc_error(error, unavailable=Reason.ENGINE_UNAVAILABLE)
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            raised.message = f"{target.address}: {raised.message}"
        raise raised from error


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
