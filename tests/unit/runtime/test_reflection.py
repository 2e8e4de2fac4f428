"""Reflection as tools ask for it: under version 1 first, and under v1alpha."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionResponse as Answer

from runtime.channels import connect
from runtime.server import GrpcServer

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer("127.0.0.1:0")
    await server.start()
    async with connect(server.address) as channel:
        yield channel
    await server.stop(0)


async def ask(channel: grpc.aio.Channel, service: str, **question: str) -> Answer:
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=Answer.FromString,
    )
    asked = iter([reflection_pb2.ServerReflectionRequest(**question)])
    return await anext(aiter(call(asked)))


@pytest.mark.parametrize("service", NAMES)
async def test_both_versions_list_and_describe_every_service(channel: grpc.aio.Channel, service: str) -> None:
    listed = (await ask(channel, service, list_services="")).list_services_response.service
    assert {*NAMES, "grpc.health.v1.Health"} == {each.name for each in listed}
    for each in listed:
        found = await ask(channel, service, file_containing_symbol=each.name)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in found.file_descriptor_response.file_descriptor_proto
        ]
        assert each.name.rpartition(".")[0] in {file.package for file in files}


async def test_version_1_is_described_by_its_own_messages(channel: grpc.aio.Channel) -> None:
    found = await ask(channel, NAMES[0], file_containing_symbol=NAMES[0])
    (data,) = found.file_descriptor_response.file_descriptor_proto
    assert b"v1alpha" not in data
    assert b".grpc.reflection.v1.ServerReflectionRequest" in data
