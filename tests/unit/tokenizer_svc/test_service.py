"""The whole service over a real socket: identity, names, limits, errors, and its own process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import struct_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2
from transformers import AutoTokenizer

from contract.errors import Reason
from tests.unit.tokenizer_svc.building import Text, conversation
from tests.unit.tokenizer_svc.families import make
from tests.unit.tokenizer_svc.running import (
    SECRET,
    Service,
    limited_service,
    prepared_by_stream,
    refused,
    signed,
    user,
)
from tokenizer_svc import check
from tokenizer_svc.prompt.limits import is_large


def request(**fields: Any) -> tokenizer_pb2.PrepareRequest:
    """Signed."""
    return tokenizer_pb2.PrepareRequest(**{"context": signed()} | fields)


def schema_format(schema: Any) -> chat_pb2.ResponseFormat:
    return chat_pb2.ResponseFormat(json_schema=chat_pb2.JsonSchema(schema_json=json.dumps(schema)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen_tools", tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def service(path: Path) -> Iterator[Service]:
    with limited_service(path) as running:
        yield running


def test_prepare_agrees_with_transformers(service: Service, path: Path) -> None:
    answer = service.stub.Prepare(request(model="small", conversation=user("Hello 🙂")))
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello 🙂"}], add_generation_prompt=True, return_dict=False
    )
    assert list(answer.token_ids) == expected
    assert not answer.HasField("grammar")
    vocabulary = service.stub.GetVocabulary(tokenizer_pb2.GetVocabularyRequest(model="tiny"))
    assert answer.vocabulary_fingerprint == vocabulary.fingerprint
    assert vocabulary.tool_call_format == "hermes"
    assert vocabulary.reasoning_format == "think"
    assert vocabulary.tokens[tokenizer.convert_tokens_to_ids("<think>")] == b"<think>"
    assert list(vocabulary.eos_token_ids) == [tokenizer.eos_token_id]


def test_switches_reach_the_template(service: Service) -> None:
    conversation = user("q")
    conversation.template_options.CopyFrom(
        struct_pb2.Struct(fields={"enable_thinking": struct_pb2.Value(bool_value=False)})
    )
    answer = service.stub.Prepare(request(conversation=conversation))
    assert answer.assistant_prefix == "<think>\n\n</think>\n\n"


def test_grammars_come_once_and_then_from_the_cache(service: Service) -> None:
    asked = request(text="Hi", response_format=schema_format({"type": "object", "format": "x"}))
    first, second = service.stub.Prepare(asked), service.stub.Prepare(asked)
    assert (first.grammar_cached, second.grammar_cached) == (False, True)
    assert first.grammar == second.grammar
    assert first.grammar.backend == "llguidance/1"
    assert [each.keyword for each in first.enforcement.enforced] == ["type"]


def test_tools_bring_a_grammar(service: Service) -> None:
    conversation = user("q")
    conversation.tools.add(name="f", parameters_json='{"type": "object"}')
    answer = service.stub.Prepare(request(conversation=conversation))
    assert "tool_calls" in answer.grammar.payload.decode()
    conversation.tool_choice.mode = chat_pb2.TOOL_CHOICE_MODE_NONE
    answer = service.stub.Prepare(request(conversation=conversation))
    assert not answer.HasField("grammar")


def test_large_conversations_come_out_as_small_ones_do(path: Path) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{each}", "parameters": {"type": "object", "title": "x" * 400}},
        }
        for each in range(100)
    ]
    messages = [{"role": "user", "content": "Say <|im_start|> and <think> to " + "me " * 50}]
    large = user(str(messages[0]["content"]))
    for tool in tools:
        large.tools.add(
            name=tool["function"]["name"], parameters_json=json.dumps(tool["function"]["parameters"])
        )
    assert is_large(tokenizer_pb2.PrepareRequest(conversation=large))
    running = Service(path)
    try:
        answer = running.stub.Prepare(request(conversation=large))
        assert list(answer.token_ids) == Text(path).ids(conversation(messages, tools))
        assert "f99" in answer.grammar.payload.decode()
        calls = [tokenizer_pb2.PrepareCall(id=1, request=request(conversation=large))]
        stream = running.stub.PrepareStream(iter([tokenizer_pb2.PrepareStreamRequest(calls=calls)]))
        (streamed,) = (each.response for message in stream for each in message.answers)
        assert (streamed.token_ids, streamed.grammar) == (answer.token_ids, answer.grammar)
        counted = running.stub.Tokenize(tokenizer_pb2.TokenizeRequest(conversation=large))
        assert counted.token_ids == answer.token_ids
        text = "me <think> " * 30_000
        whole = running.stub.Prepare(request(text=text))
        ids = tokenizer_pb2.EncodedPrompt(ids=whole.token_ids)
        again = running.stub.Prepare(request(encoded=ids))
        assert again.token_ids == whole.token_ids
        by_stream = asyncio.run(prepared_by_stream(running.target, "me <think> " * 40_000, "Hi"))
        singly = [running.stub.Prepare(request(text=each)) for each in ("me <think> " * 40_000, "Hi")]
        assert by_stream == [list(each.token_ids) for each in singly]
        form = chat_pb2.ResponseFormat(choice=chat_pb2.Choice(options=[f"o{each}" for each in range(9_000)]))
        chosen = running.stub.Prepare(request(text="Hi", response_format=form))
        assert "o8999" in chosen.grammar.payload.decode()
        assert len(chosen.token_ids) > 0
        cut = request(text=text, max_prompt_tokens=5, truncation=tokenizer_pb2.TRUNCATION_KEEP_END)
        kept = running.stub.Prepare(cut)
        assert kept.token_ids == whole.token_ids[-5:]
        assert kept.num_truncated_tokens == len(whole.token_ids) - 5
        counted = running.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text=text))
        assert counted.token_ids == whole.token_ids
        beyond = request(context=signed(max_context_tokens=9), text="x" * (4 << 20))
        error = refused(running.stub.Prepare, beyond)
        assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "prompt")
        assert "at least" in error.message
        beyond = request(text="x" * ((8 << 20) + 100))
        error = refused(running.stub.Prepare, beyond)
        assert (error.reason, error.field) == (Reason.REQUEST_TOO_LARGE, "prompt")
        assert f"limit is {8 << 20}" in error.message
        # Errors are the same as well.
        short = request(context=signed(max_context_tokens=9), conversation=large)
        error = refused(running.stub.Prepare, short)
        assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "messages")
        assert error.metadata["max_context_tokens"] == "9"
        large.tools[7].parameters_json = "{"
        error = refused(running.stub.Prepare, request(conversation=large))
        assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "tools[7].function.parameters")
    finally:
        assert running.stop() == 0


def test_too_much_beside_the_texts_is_refused(service: Service) -> None:
    large = user("x")
    document = struct_pb2.Struct(fields={"text": struct_pb2.Value(string_value="y" * 1000)})
    large.documents.extend([document] * 30)
    for call, message in (
        (service.stub.Prepare, request(conversation=large)),
        (service.stub.Tokenize, tokenizer_pb2.TokenizeRequest(conversation=large)),
    ):
        error = refused(call, message)
        assert (error.reason, error.field) == (Reason.REQUEST_TOO_LARGE, "messages")
        assert "bytes with its tools and documents; the limit is 25000: send less" in error.message


def test_tools_larger_than_grammars_may_be_take_any_object_unless_they_are_strict(service: Service) -> None:
    asked = user("x")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "description": "y" * 4000}
    for name, written in (("small", {**schema, "description": ""}), ("one", schema), ("two", schema)):
        asked.tools.add(name=name, parameters_json=json.dumps(written))
    answer = service.stub.Prepare(request(conversation=asked))
    (told,) = answer.enforcement.unenforced
    assert (told.keyword, told.path) == ("parameters", "/tools/1/parameters")
    assert "tool 'one' takes any JSON object" in told.note
    assert "the limit of all together is 5000: use less" in told.note
    asked.tools[1].strict = asked.tools[2].strict = True
    error = refused(service.stub.Prepare, request(conversation=asked))
    assert (error.reason, error.field) == (Reason.GRAMMAR_REFUSED, "tools[2].function.parameters")
    assert "more than 5000 bytes together" in error.message


def test_too_many_finished_texts_are_refused(service: Service) -> None:
    # Bytes count, not characters; and so do texts without any.
    for texts, limit in (
        (["x" * 20000, "x"], "limit is 20000"),
        (["東" * 7000], "limit is 20000"),
        ([""] * 8193, "limit is 8192"),
    ):
        judged = tokenizer_pb2.ValidateOutputRequest(context=signed(), schema_json="true", texts=texts)
        error = refused(service.stub.ValidateOutput, judged)
        assert (error.reason, error.field) == (Reason.REQUEST_TOO_LARGE, "texts")
        assert limit in error.message


def test_long_prompts_are_refused_or_cut(service: Service) -> None:
    ids = list(service.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="one two three four")).token_ids)
    error = refused(service.stub.Prepare, request(text="one two three four", max_prompt_tokens=len(ids) - 1))
    assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "prompt")
    assert error.metadata == {"prompt_tokens": str(len(ids)), "max_context_tokens": str(len(ids) - 1)}
    end, start = tokenizer_pb2.TRUNCATION_KEEP_END, tokenizer_pb2.TRUNCATION_KEEP_START
    for truncation, kept in ((end, ids[-3:]), (start, ids[:3])):
        cut = service.stub.Prepare(
            request(text="one two three four", max_prompt_tokens=3, truncation=truncation)
        )
        assert (list(cut.token_ids), cut.num_truncated_tokens) == (kept, len(ids) - 3)
    whole = request(context=signed(max_context_tokens=5), conversation=user("word " * 50))
    error = refused(service.stub.Prepare, whole)
    assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "messages")
    # The last turn stays, however long it is.
    whole.truncation = end
    error = refused(service.stub.Prepare, whole)
    assert (error.reason, error.field) == (Reason.CONTEXT_LENGTH_EXCEEDED, "messages")
    whole.truncation = start
    error = refused(service.stub.Prepare, whole)
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "truncation")


def said(*turns: tuple[str, str]) -> chat_pb2.Conversation:
    messages = [
        chat_pb2.Message(role=chat_pb2.Role.Value(f"ROLE_{role.upper()}"), content=content)
        for role, content in turns
    ]
    return chat_pb2.Conversation(messages=messages)


# The last is a worker's.
@pytest.mark.parametrize(("beside", "num_words"), [("", 3), ("", 300), ("<<<<<< ", 190)])
def test_as_few_of_the_oldest_turns_go_as_it_takes(service: Service, beside: str, num_words: int) -> None:
    system, last = ("system", "Stay."), ("user", "last")
    pairs = [
        (("user", f"w{number} {beside}" * num_words), ("assistant", f"a{number} {beside}" * num_words))
        for number in range(3)
    ]
    talk = said(system, *(each for pair in pairs for each in pair), last)
    cuts = tokenizer_pb2.PrepareRequest(conversation=talk, truncation=tokenizer_pb2.TRUNCATION_KEEP_END)
    assert is_large(cuts) is bool(beside)
    whole = service.stub.Prepare(request(conversation=talk))
    lengths = []
    for num_out in range(4):
        rest = said(system, *(each for pair in pairs[num_out:] for each in pair), last)
        expected = service.stub.Prepare(request(conversation=rest)).token_ids
        lengths.append(len(expected))
        for most in (len(expected), len(expected) + 1):
            limits = {"max_prompt_tokens": most, "truncation": tokenizer_pb2.TRUNCATION_KEEP_END}
            cut = service.stub.Prepare(request(conversation=talk, **limits))
            assert cut.token_ids == expected
            assert cut.num_truncated_tokens == len(whole.token_ids) - len(expected)
            assert (cut.num_truncated_turns, cut.num_turns) == ((num_out, 4) if num_out else (0, 0))
            counted = service.stub.Tokenize(tokenizer_pb2.TokenizeRequest(conversation=talk, **limits))
            assert counted.token_ids == expected
            assert (counted.num_truncated_turns, counted.num_turns) == ((num_out, 4) if num_out else (0, 0))
    assert lengths == sorted(set(lengths), reverse=True)


def test_a_text_can_be_prepared_without_what_stands_around_it(service: Service) -> None:
    plain = service.stub.Tokenize(tokenizer_pb2.TokenizeRequest(text="one two", add_special_tokens=False))
    for adds in (None, True, False):
        prepared = service.stub.Prepare(request(text="one two", add_special_tokens=adds))
        counted = service.stub.Tokenize(
            tokenizer_pb2.TokenizeRequest(text="one two", add_special_tokens=adds)
        )
        assert prepared.token_ids == counted.token_ids
        assert (prepared.token_ids == plain.token_ids) or adds is not False


def test_finished_texts_are_judged(service: Service) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    request = tokenizer_pb2.ValidateOutputRequest(
        context=signed(), schema_json=json.dumps(schema), texts=['{"a": [1]}', '{"a": [1, 1]}', "{", "[]"]
    )
    verdicts = service.stub.ValidateOutput(request).verdicts
    assert [each.valid for each in verdicts] == [True, False, False, False]
    broken = verdicts[1]
    assert (broken.keyword, broken.schema_path, broken.instance_path) == (
        "uniqueItems", "/properties/a/uniqueItems", "/a",
    )  # fmt: skip
    assert verdicts[2].message == "the text is not JSON"
    request.schema_json = '{"$ref": "file:///etc/passwd"}'
    assert refused(service.stub.ValidateOutput, request).reason is Reason.GRAMMAR_REFUSED
    request.ClearField("context")
    assert refused(service.stub.ValidateOutput, request).reason is Reason.CONTEXT_SIGNATURE_INVALID


def test_counted_tokens_are_those_of_the_prompt(service: Service) -> None:
    rendered = service.stub.Tokenize(tokenizer_pb2.TokenizeRequest(conversation=user("x"))).token_ids
    prepared = service.stub.Prepare(request(conversation=user("x")))
    assert rendered == prepared.token_ids


def test_encoded_prompts_are_checked(service: Service) -> None:
    encoded = tokenizer_pb2.EncodedPrompt(ids=[1, 2, 3])
    answer = service.stub.Prepare(request(encoded=encoded))
    assert list(answer.token_ids) == [1, 2, 3]
    many = tokenizer_pb2.EncodedPrompt(ids=[1] * 5001)
    for message, reason in (
        (request(encoded=many), Reason.REQUEST_TOO_LARGE),
        (request(context=signed(max_context_tokens=2), encoded=encoded), Reason.CONTEXT_LENGTH_EXCEEDED),
    ):
        error = refused(service.stub.Prepare, message)
        assert (error.reason, error.field) == (reason, "prompt")
    assert "limit is 5000" in refused(service.stub.Prepare, request(encoded=many)).message
    error = refused(service.stub.Prepare, request(encoded=tokenizer_pb2.EncodedPrompt(ids=[1, 99999])))
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "prompt[1]")


def test_identity_is_verified(service: Service) -> None:
    unsigned = tokenizer_pb2.PrepareRequest(text="x")
    assert refused(service.stub.Prepare, unsigned).reason is Reason.CONTEXT_SIGNATURE_INVALID
    forged = signed()
    forged.signature = bytes(32)
    error = refused(service.stub.Prepare, request(context=forged, text="x"))
    assert error.reason is Reason.CONTEXT_SIGNATURE_INVALID
    other = request(context=signed(allowed_models=["big"]), model="small", text="x")
    assert refused(service.stub.Prepare, other).reason is Reason.MODEL_NOT_ALLOWED


def test_unknown_models_are_named(service: Service) -> None:
    error = refused(service.stub.Prepare, request(model="gpt", text="x"))
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert "'gpt'" in error.message
    assert "'small'" in error.message


def test_refusals_name_field_and_limit(service: Service) -> None:
    prepare = service.stub.Prepare

    many = chat_pb2.Conversation(messages=list(user("x").messages) * 9)
    long = chat_pb2.ResponseFormat(regex="a" * 5001)
    choices = chat_pb2.ResponseFormat(choice=chat_pb2.Choice(options=[""] * 1001))
    wrong_role = chat_pb2.Conversation(messages=[chat_pb2.Message(content="x")])
    tools = user("x")
    tools.tool_choice.mode = chat_pb2.TOOL_CHOICE_MODE_REQUIRED
    named = user("x")
    named.tools.add(name="f")
    named.tool_choice.mode = chat_pb2.TOOL_CHOICE_MODE_NAMED
    named.tool_choice.name = "g"
    broken = user("x")
    broken.tools.add(name="f", parameters_json="{")
    expected = [
        (request(conversation=many), Reason.REQUEST_TOO_LARGE, "messages", "limit is 8"),
        (request(text="x" * 20001), Reason.REQUEST_TOO_LARGE, "prompt", "limit is 20000"),
        (
            request(text="x", response_format=choices),
            Reason.GRAMMAR_REFUSED,
            "response_format.choice",
            "5000",
        ),
        (request(text="x", response_format=long), Reason.GRAMMAR_REFUSED, "response_format.regex", "5000"),
        (request(conversation=wrong_role), Reason.INVALID_ARGUMENT, "messages[0].role", "role"),
        (request(conversation=chat_pb2.Conversation()), Reason.INVALID_ARGUMENT, "messages", "at least one"),
        (request(), Reason.INVALID_ARGUMENT, "input", "no input"),
        (request(conversation=tools), Reason.INVALID_ARGUMENT, "tool_choice", "needs tools"),
        (request(conversation=named), Reason.INVALID_ARGUMENT, "tool_choice", "tools: f"),
        (request(conversation=broken), Reason.INVALID_ARGUMENT, "tools[0].function.parameters", "not JSON"),
    ]
    for message, reason, field, part in expected:
        error = refused(prepare, message)
        assert (error.reason, error.field) == (reason, field)
        assert part in error.message


@pytest.mark.parametrize(
    ("schema", "strict", "accepted", "unenforced", "why"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, True, True, [], ""),
        ({"type": "array", "uniqueItems": True}, False, True, ["/uniqueItems"], "/uniqueItems"),
        ({"type": "string", "enum": [1]}, False, False, None, "no value matches"),
    ],
)
def test_the_command_reports_what_of_a_schema_is_enforced(
    schema: Any,
    strict: bool,
    accepted: bool,
    unenforced: list[str] | None,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    check.main([str(tmp_path / "schema.json"), "--json"])
    written = json.loads(capsys.readouterr().out)
    assert (written["accepted_strict"], written["accepted"]) == (strict, accepted)
    assert why in written["refusal"]
    if unenforced is not None:
        assert [each["path"] for each in written["unenforced"]] == unenforced


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"\xef\xbb\xbf" + b'{"type": "string"}', 0, "accepted"),
        ('{"type": "string"}'.encode("utf-16"), 2, "save it as UTF-8"),
        (b'{"enum": ["' + b"x" * (1 << 20) + b'"]}', 2, "the limit of the service"),
        (b'"' + "é".encode() * (4 << 20), 2, "the limit of the service"),
        (b"", 1, "not valid JSON"),
    ],
)
def test_the_command_reads_what_a_request_could_carry(
    data: bytes, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schema.json").write_bytes(data)
    assert check.main([str(tmp_path / "schema.json")]) == code
    written = capsys.readouterr()
    assert said in written.out + written.err


def test_health_and_metrics(service: Service) -> None:
    import httpx

    health: Any = health_pb2_grpc.HealthStub(service.channel)
    status = health.Check(
        health_pb2.HealthCheckRequest(service="millrace.tokenizer.v1.TokenizerService")
    ).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    service.stub.Prepare(request(model="small", conversation=user("Hello")))
    address = service.ready.partition("metrics=")[2].split()[0]
    text = httpx.get(f"http://{address}/metrics").text
    assert 'millrace_tokenizer_stage_seconds_count{stage="encode"}' in text


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"MILLRACE_TOKENIZER__NOPE": "1"}, "nope"),
        ({"MILLRACE_TOKENIZER__COMPILE__WORKERS": "0"}, "tokenizer.compile.workers"),
        ({"MILLRACE_SECURITY__CONTEXT_SECRET": "short"}, "context_secret"),
        ({"MILLRACE_MODEL__PATH": "/nowhere/at/all"}, "model.path"),
    ],
)
def test_bad_configuration_ends_with_one_line(path: Path, settings: dict[str, str], part: str) -> None:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "MILLRACE_MODEL__PATH": str(path),
        "MILLRACE_SECURITY__CONTEXT_SECRET": SECRET,
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tokenizer_svc"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr
