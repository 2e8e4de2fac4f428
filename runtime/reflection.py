"""gRPC reflection under both of its names: v1, which tools ask for first, and v1alpha.

grpcio-reflection has v1alpha alone. Version 1 is the same messages in another package, so that one servicer
answers both; its descriptor is made from the other, and can be asked for like any service's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

_ALPHA_PACKAGE = "grpc.reflection.v1alpha"
_PACKAGE = "grpc.reflection.v1"
_FILE = "grpc/reflection/v1/reflection.proto"
_SERVICE = f"{_PACKAGE}.ServerReflection"

SERVICE_NAMES: Sequence[str] = (_SERVICE, reflection.SERVICE_NAME)


def add_reflection(names: Sequence[str], server: Any) -> None:
    """Has `server` describe the services with these full names."""
    reflection.enable_server_reflection(names, server)
    _describe()
    handler = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {"ServerReflectionInfo": handler}),)
    )


def _describe() -> None:
    pool: Any = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name, file.package = _FILE, _PACKAGE
        # They name v1alpha's packages in other languages.
        file.ClearField("options")
        for field in (field for message in file.message_type for field in message.field):
            # An empty name is a mistake where the type is a scalar.
            if field.type_name:
                field.type_name = field.type_name.replace(_ALPHA_PACKAGE, _PACKAGE)
        for method in (method for service in file.service for method in service.method):
            method.input_type = method.input_type.replace(_ALPHA_PACKAGE, _PACKAGE)
            method.output_type = method.output_type.replace(_ALPHA_PACKAGE, _PACKAGE)
        pool.AddSerializedFile(file.SerializeToString())
