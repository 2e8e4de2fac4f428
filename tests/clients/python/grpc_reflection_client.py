"""A client without protos: it asks the server for them, by both versions of reflection, and then calls."""

from __future__ import annotations

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from report import ADDRESS, ANSWER, API_KEY, MODEL, QUESTION, refused, works

SERVICE = "millrace.inference.v1.InferenceService"


class WithKey(grpc.StreamStreamClientInterceptor):
    """Sends the key; the library's own stub has no place for it. `version` takes the place of v1alpha."""

    def __init__(self, key: str, version: str) -> None:
        self._key, self._version = key, version

    def intercept_stream_stream(self, continuation: object, details: object, requests: object) -> object:
        """See grpc.StreamStreamClientInterceptor."""
        method = details.method.replace("v1alpha", self._version)
        changed = details._replace(method=method, metadata=[("authorization", f"Bearer {self._key}")])
        return continuation(changed, requests)


channel = grpc.insecure_channel(ADDRESS)


def database(version: str, key: str = API_KEY) -> ProtoReflectionDescriptorDatabase:
    """What the server says about itself. Messages of both versions are the same."""
    return ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, WithKey(key, version)))


def chat(version: str) -> str:
    """An answer, by descriptors alone."""
    service = DescriptorPool(database(version)).FindServiceByName(SERVICE)
    method = service.FindMethodByName("Chat")
    asked, answered = (GetMessageClass(each) for each in (method.input_type, method.output_type))
    body = {
        "model": MODEL,
        "conversation": {"messages": [{"role": "ROLE_USER", "content": QUESTION}]},
        "sampling": {"temperature": 0},
    }
    call = channel.unary_stream(
        f"/{SERVICE}/Chat",
        request_serializer=asked.SerializeToString,
        response_deserializer=answered.FromString,
    )
    responses = list(
        call(
            json_format.ParseDict(body, asked()),
            metadata=[("authorization", f"Bearer {API_KEY}")],
            timeout=60,
        )
    )
    return "".join(choice.content for response in responses for choice in response.choices)


for version in ("v1alpha", "v1"):
    with works(f"list by {version}"):
        services = database(version).get_services()
        assert SERVICE in services, services
    with works(f"call by {version}"):
        assert ANSWER in chat(version)
with refused("wrong key", grpc.RpcError, "key"):
    database("v1", "mr-wrong").get_services()
