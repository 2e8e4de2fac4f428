"""The command line against a real gRPC server whose answers are known."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator
from concurrent import futures
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from grpc_status import rpc_status
from millrace.common.v1 import chat_pb2, output_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc
from rich.console import Console
from typer.testing import CliRunner

from contract.errors import MillraceError, Reason
from contract.proto.status import to_status
from runtime.errors import ConfigError
from services.cli import chat, owners
from services.cli.app import app
from services.cli.chat import ChatSession, talk
from services.cli.inference import InferenceClient, response_format, told_defaults, told_model
from services.cli.repetition import is_repetition
from services.cli.target import ServerTarget
from services.supervisor.config import make_private

HERE = Path(__file__).resolve().parent
SURFACE = HERE / "cli_surface.txt"


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Echoes the last message in pieces and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer good":
            error = MillraceError(Reason.INVALID_CREDENTIALS, "the API key is not known; create one")
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="tiny", max_model_len=4096)])

    def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> Iterator[inference_pb2.ChatResponse]:
        self.requests.append(request)
        text = request.conversation.messages[-1].content
        if text == "refuse" or (text == "near the end" and request.sampling.HasField("max_tokens")):
            error = MillraceError(Reason.CONTEXT_LENGTH_EXCEEDED, "too long; the limit is 4096")
            context.abort_with_status(rpc_status.to_status(to_status(error)))
        if request.conversation.continue_final_message:
            yield inference_pb2.ChatResponse(choices=[inference_pb2.ChatChoice(content="cut")])
            return
        if text == "babble":
            for _ in range(10_000):
                if not context.is_active():
                    return
                yield inference_pb2.ChatResponse(choices=[inference_pb2.ChatChoice(content="and so on ")])
            return
        for piece in ("You said: ", text):
            yield inference_pb2.ChatResponse(choices=[inference_pb2.ChatChoice(content=piece)])
            if text == "cut":
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection ended")
        if text == "long":
            ended = inference_pb2.ChatChoice(finish_reason=output_pb2.FINISH_REASON_LENGTH)
            yield inference_pb2.ChatResponse(choices=[ended])
        yield inference_pb2.ChatResponse(usage=output_pb2.Usage(prompt_tokens=3, completion_tokens=2))

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        for piece in (" and", " so on"):
            yield inference_pb2.GenerateResponse(choices=[inference_pb2.GenerateChoice(text=piece)])


@pytest.fixture
def server() -> Iterator[tuple[str, Inference]]:
    servicer = Inference()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(0).wait()


@pytest.fixture
def run(server: tuple[str, Inference], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MILLRACE_URL", server[0])
    monkeypatch.setenv("MILLRACE_API_KEY", "good")
    runner = CliRunner()
    return lambda *arguments, **options: runner.invoke(app, arguments, **options)


def test_surface_is_frozen() -> None:
    """Scripts depend on it. After a deliberate change write the printed text to cli_surface.txt."""
    surface = "\n".join(_surface(typer.main.get_command(app), "millrace")) + "\n"
    assert surface == SURFACE.read_text(encoding="utf-8"), surface


def _surface(command: Any, path: str) -> Iterator[str]:
    nested = getattr(command, "commands", None)
    if nested is not None:
        for name in sorted(nested):
            yield from _surface(nested[name], f"{path} {name}")
        return
    options = [
        "|".join(sorted([*parameter.opts, *parameter.secondary_opts]))
        for parameter in command.params
        if parameter.param_type_name == "option"
    ]
    arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
    yield " ".join([path, *arguments, *sorted(option for option in options if option != "--help")])


def test_chat_with_one_question(run: Any) -> None:
    result = run("chat", "hello")
    assert (result.exit_code, result.stdout) == (0, "You said: hello\n")


def test_an_answer_that_was_cut_is_continued(
    run: Any, server: tuple[str, Inference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_PAUSES_S", (0.0,))
    assert run("chat", "cut").stdout == "You said: cut\n"
    texts = [message.content for message in server[1].requests[-1].conversation.messages]
    assert texts == ["cut", "You said: "]
    refused = run("chat", "cut", "--regex", "You said: .*")
    assert refused.exit_code == 1, "a grammar would begin again in the middle"
    assert len(server[1].requests) == 3


def test_an_answer_is_bounded_unless_the_user_says_how_long(run: Any, server: tuple[str, Inference]) -> None:
    assert "ended after 1,024 tokens; --max-tokens allows more" in run("chat", "long").stderr
    assert server[1].requests[-1].sampling.max_tokens == 1024
    assert "ended after" not in run("chat", "long", "--max-tokens", "7").stderr
    assert server[1].requests[-1].sampling.max_tokens == 7


def test_a_context_with_less_left_than_the_bound_is_the_bound(
    run: Any, server: tuple[str, Inference]
) -> None:
    result = run("chat", "near the end")
    assert (result.exit_code, result.stdout) == (0, "You said: near the end\n")
    assert not server[1].requests[-1].sampling.HasField("max_tokens")
    assert run("chat", "near the end", "--max-tokens", "7").exit_code == 1


def test_chat_from_standard_input(run: Any) -> None:
    assert run("chat", input="piped").stdout == "You said: piped\n"


def test_chat_options_reach_the_request(run: Any, server: tuple[str, Inference], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    options = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "5", "--seed", "0")
    result = run("chat", "hi", *options, "--stop", "END", "--tier", "batch", "--schema", str(schema))
    assert result.exit_code == 0, result.output
    request = server[1].requests[-1]
    assert [message.role for message in request.conversation.messages] == [
        chat_pb2.ROLE_SYSTEM,
        chat_pb2.ROLE_USER,
    ]
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (5, ["END"])
    assert request.service_tier == "batch"
    assert request.response_format.json_schema.schema_json == '{"type": "object"}'


def test_generate_streams_the_continuation(run: Any, server: tuple[str, Inference]) -> None:
    assert run("generate", "Once", "--regex", "[a-z ]+").stdout == " and so on\n"
    assert server[1].requests[-1].text == "Once"
    assert server[1].requests[-1].response_format.regex == "[a-z ]+"


def test_models(run: Any) -> None:
    assert run("models").stdout == "tiny  4096 tokens\n"


def test_models_say_what_they_can_do_and_whether_their_length_is_known() -> None:
    def told(length: int, *tasks: str) -> str:
        return told_model(inference_pb2.Model(id="m", max_model_len=length, tasks=tasks))

    assert told(256, "embed") == "m  256 tokens  embed"
    assert told(0, "score", "classify") == "m  not loaded  score, classify"
    assert told(0, "generate") == "m  not loaded"


def test_refusal_is_one_clear_line(run: Any) -> None:
    result = run("chat", "refuse")
    assert result.exit_code == 1
    assert result.stderr.strip() == "millrace: too long; the limit is 4096"


def test_a_bad_key_is_reported(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_API_KEY", "bad")
    result = run("models")
    assert result.exit_code == 1
    assert "the API key is not known" in result.stderr


def test_server_that_is_not_there_is_named(run: Any) -> None:
    result = run("models", "--url", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr


def test_contradicting_constraints_are_refused() -> None:
    with pytest.raises(ConfigError, match="--schema and --regex"):
        response_format("{}", "a")


def test_parser_that_is_not_known_is_refused_with_the_names() -> None:
    result = CliRunner().invoke(app, ["up", "--tool-call-parser", "pythonic"])
    assert result.exit_code == 2
    for name in ("--tool-call-parser", "pythonic", "hermes", "mistral_v13"):
        assert name in result.stderr


def test_two_options_of_up_must_be_in_range() -> None:
    result = CliRunner().invoke(app, ["up", "--engines", "0"])
    assert result.exit_code == 2
    assert "--engines" in result.stderr


def test_a_key_does_not_go_in_clear_to_a_server_that_was_named_by_https(
    server: tuple[str, Inference], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It speaks no TLS, so nothing arrives there."""
    target = ServerTarget(server[0], "good", "tiny", f"https://{server[0]}")
    with InferenceClient(target) as client, pytest.raises(MillraceError):
        client.models()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        InferenceClient(target)


@pytest.fixture
def conversation(server: tuple[str, Inference]) -> Iterator[tuple[ChatSession, io.StringIO]]:
    out = io.StringIO()
    with InferenceClient(ServerTarget(server[0], "good", "tiny")) as client:
        yield (
            ChatSession(
                client, {"model": "tiny"}, "Be brief.", Console(file=out), Console(file=io.StringIO())
            ),
            out,
        )


def test_conversation_keeps_its_history(
    conversation: tuple[ChatSession, io.StringIO], server: tuple[str, Inference]
) -> None:
    lines = iter(["one", "", "two", "/nonsense", "refuse", "/reset", "three", "/quit", "never read"])
    notes = Console(file=io.StringIO())
    talk(conversation[0], lambda _: next(lines), notes)
    assert conversation[1].getvalue() == "You said: one\nYou said: two\nYou said: three\n"
    texts = [[m.content for m in request.conversation.messages] for request in server[1].requests]
    assert texts[0] == ["Be brief.", "one"]
    assert texts[1] == ["Be brief.", "one", "You said: one", "two"]
    # A refused question is forgotten, and so is everything after /reset but the system message.
    assert texts[4] == ["Be brief.", "three"]
    assert isinstance(notes.file, io.StringIO)
    assert "unknown command /nonsense" in notes.file.getvalue()
    assert "too long" in notes.file.getvalue()


def test_an_answer_that_repeats_itself_is_ended(
    conversation: tuple[ChatSession, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = io.StringIO()
    monkeypatch.setattr(conversation[0], "_notes", Console(file=notes))
    answer = conversation[0].ask("babble")
    assert 400 <= len(answer) < 1000
    assert "it repeats itself" in notes.getvalue()
    # The next answer is another one.
    assert conversation[0].ask("one") == "You said: one"


_LINE = "He said that he would come back, and nobody believed him. "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x" * 399, False),
        ("x" * 400, True),
        ("It begins well. " + "no " * 134, True),
        (_LINE * 4, False),
        (_LINE * 7, True),
        ("Once. " + _LINE * 7 + _LINE[:20], True),
        (_LINE * 7 + "But then he did.", False),
        # A piece of 401 characters is a paragraph, and may be a refrain.
        ("".join(map(chr, range(0x4E00, 0x4E00 + 401))) * 6, False),
        ("".join(map(chr, range(0x4E00, 0x4E00 + 400))) * 5, True),
        ("".join(f"{number}, " for number in range(500)), False),
        ("".join(f"{number} x 7 = {number * 7}\n" for number in range(60)), False),
        ("", False),
    ],
)
def test_what_counts_as_repetition(text: str, expected: bool) -> None:
    assert is_repetition(text) is expected


def test_a_conversation_begins_with_the_models_own_sampling_options(
    conversation: tuple[ChatSession, io.StringIO],
) -> None:
    own = [
        inference_pb2.SamplingDefault(option="temperature", value=0.8, source="llama.cpp"),
        inference_pb2.SamplingDefault(option="top_k", value=40, source="llama.cpp"),
        inference_pb2.SamplingDefault(option="top_p", value=0.5, source="the configuration"),
    ]
    model = inference_pb2.Model(id="tiny", sampling_defaults=own)
    whole = "temperature 0.8, top_k 40 (llama.cpp); top_p 0.5 (the configuration)"
    assert told_defaults(model, {}) == whole
    assert told_defaults(model, {"temperature": 0.0, "top_p": None}) == whole.replace("temperature 0.8, ", "")
    assert told_defaults(None, {}) == ""


def test_conversation_ends_with_its_input(conversation: tuple[ChatSession, io.StringIO]) -> None:
    def read(_: str) -> str:
        raise EOFError

    talk(conversation[0], read, Console(file=io.StringIO()))
    assert conversation[1].getvalue() == ""


def test_doctor_finds_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With a stack that runs beside the tests, the output differs.
    monkeypatch.setenv("MILLRACE_STATE_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for subject in ("python", "processor", "memory", "torch", "envoy", "port", "vllm"):
        assert subject in result.stdout
    assert sys.executable in result.stdout.replace("\n", "")


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"millrace {version('millrace')}\n")


@pytest.fixture
def kept_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("kept_umask")
def test_state_directory_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILLRACE_STATE_DIR", str(tmp_path / "file" / "state"))
    for detach in ((), ("--detach",)):
        result = CliRunner().invoke(app, ["up", "--simulated", *detach])
        assert result.exit_code == 2
        assert "cannot be written" in result.output.replace("\n", " ")
        assert "MILLRACE_STATE_DIR" in result.output


@pytest.mark.parametrize("command", ["status", "stop"])
def test_no_stack_is_one_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_STATE_DIR", str(tmp_path))
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 2
    assert "no stack runs" in result.stderr


@pytest.mark.parametrize(
    "command", ["trace", "why", "diagnose", "top", "keys", "usage", "schema check", "plan"]
)
def test_help_names_the_program(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    CliRunner().invoke(app, [*command.split(), "--help"])
    shown = capfd.readouterr().out
    assert "python -m" not in shown
    assert command == "plan" or f"usage: millrace {command}" in shown


def test_last_waits_for_the_request_that_was_just_sent_and_diagnose_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[list[str]] = []

    def run_module(module: str, arguments: list[str]) -> int:
        given.append(arguments)
        return 0

    monkeypatch.setattr(owners, "run_module", run_module)
    monkeypatch.setattr(owners, "trace_store", lambda: "traces")
    monkeypatch.setattr(owners, "last_request", lambda: ["--after", "r-1"])
    for command in ("trace", "why", "diagnose"):
        assert CliRunner().invoke(app, [command]).exit_code == 0
    assert given == [["--store", "traces", "--after", "r-1"]] * 2 + [["--store", "traces"]]


def test_diagnose_offers_no_request_to_wait_for(capfd: pytest.CaptureFixture[str]) -> None:
    for command, offers in (("why", True), ("diagnose", False)):
        CliRunner().invoke(app, [command, "--help"])
        assert ("--after" in capfd.readouterr().out) == offers


@pytest.mark.usefixtures("kept_umask")
def test_what_a_stack_writes_is_its_owners_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "logs").mkdir(parents=True)
    (state / "keys.sqlite").touch(0o644)
    make_private(state)
    (state / "new").touch()
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (state, state / "keys.sqlite", state / "new")]
    assert modes == [0o700, 0o600, 0o600]
