"""The client of the wheel millrace-client against a server that plays a script."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import millrace_client
import pytest
from millrace.common.v1 import chat_pb2, output_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc
from millrace_client import (
    AnswerStream,
    CallCancelledError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    LimitExceededError,
    MillraceApiError,
    MillraceClient,
    RetryPolicy,
    TlsFiles,
    UnavailableError,
)
from millrace_client.details import read_details

from contract.errors import MillraceError, Reason
from contract.proto.status import to_status
from tests.architecture.sources import ROOT

_AT_ONCE = RetryPolicy(first_pause_s=0, longest_pause_s=0)


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Answers each call by the next list: messages are sent, errors end the call, WAIT has no end."""

    def __init__(self) -> None:
        self.script: list[list[object]] = []
        self.asked: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.left_s: list[float | None] = []
        self.was_cancelled = asyncio.Event()

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for each in self._play(request, context):
            yield each

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for each in self._play(request, context):
            yield each

    async def Embed(self, request: Any, context: Any) -> Any:
        return await anext(self._play(request, context))

    async def _play(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.left_s.append(context.time_remaining())
        for each in self.script.pop(0):
            if isinstance(each, MillraceError):
                status = to_status(each)
                trailing = (("grpc-status-details-bin", status.SerializeToString()),)
                context.set_trailing_metadata(trailing)
                await context.abort(each.mapping.grpc_code, each.message)
            elif each is WAIT:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.was_cancelled.set()
            else:
                yield each


WAIT = object()


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Scripted, MillraceClient]]:
    servicer = Scripted()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with MillraceClient(f"http://127.0.0.1:{port}", "mr-key", **options) as client:
            yield servicer, client
    finally:
        await server.stop(None)


def part(content: str = "", *, usage: bool = False) -> inference_pb2.ChatResponse:
    made = inference_pb2.ChatResponse(request_id="r-1", choices=[{"content": content}] if content else [])
    if usage:
        made.usage.completion_tokens = 2
    return made


def down(retry_after_s: float | None = None) -> MillraceError:
    return MillraceError(Reason.ENGINE_UNAVAILABLE, "no engine serves it", retry_after_s=retry_after_s)


async def test_an_answer_is_streamed_with_key_and_deadline() -> None:
    async with served() as (server, client):
        server.script = [[part("Hel"), part("lo"), part(usage=True)]]
        answer = client.chat("Hi!", model="m", temperature=0, max_tokens=0, service_tier="gold", timeout_s=50)
        assert await answer.text() == "Hello"
    assert answer.request_id == "r-1"
    assert answer.usage == output_pb2.Usage(completion_tokens=2)
    (request,) = server.asked
    assert request.model == "m"
    assert request.conversation.messages[0] == chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Hi!")
    assert (request.sampling.HasField("temperature"), request.sampling.HasField("max_tokens")) == (True, True)
    assert request.service_tier == "gold"
    assert server.metadata[0]["authorization"] == "Bearer mr-key"
    # On the wire a deadline is rounded up, by less than a second.
    assert 0 < (server.left_s[0] or 0) < 51


async def test_nobody_answering_is_tried_again_before_the_first_message() -> None:
    async with served(retry=_AT_ONCE) as (server, client):
        server.script = [[down()], [down()], [part("here")]]
        assert await client.chat("Hi!", model="m").text() == "here"
        assert len(server.asked) == 3
        server.script = [[down()], [inference_pb2.EmbedResponse(embeddings=[{"values": [1.0]}])]]
        assert len((await client.embed("text", model="m")).embeddings) == 1


async def test_what_has_begun_is_never_begun_again() -> None:
    async with served(retry=_AT_ONCE) as (server, client):
        server.script = [[part("He"), down()], [part("never")]]
        answer = client.chat("Hi!", model="m")
        assert (await anext(answer)).choices[0].content == "He"
        with pytest.raises(UnavailableError) as raised:
            await anext(answer)
        assert raised.value.reason == "ENGINE_UNAVAILABLE"
        assert len(server.asked) == 1


async def test_attempts_end() -> None:
    async with served(retry=RetryPolicy(attempts=3, first_pause_s=0)) as (server, client):
        server.script = [[down()]] * 9
        with pytest.raises(UnavailableError, match="no engine serves it"):
            await client.chat("Hi!", model="m").text()
        assert len(server.asked) == 3


async def test_an_attempt_that_would_come_too_late_is_none() -> None:
    async with served(retry=_AT_ONCE) as (server, client):
        server.script = [[down(retry_after_s=1000)], [part("late")]]
        with pytest.raises(UnavailableError) as raised:
            await client.chat("Hi!", model="m", timeout_s=60).text()
        assert raised.value.retry_after_s == 1000
        assert len(server.asked) == 1


async def test_refusals_are_typed_and_name_field_and_limit() -> None:
    refused = MillraceError(
        Reason.CONTEXT_LENGTH_EXCEEDED,
        "messages: 9 tokens, 8 fit; shorten them",
        field="messages",
        metadata={"prompt_tokens": "9", "max_context_tokens": "8"},
    )
    later = MillraceError(Reason.REQUEST_RATE_EXCEEDED, "come back", retry_after_s=1.5)
    async with served(retry=_AT_ONCE) as (server, client):
        server.script = [[refused], [later], [part("unreached")]]
        with pytest.raises(InvalidRequestError) as raised:
            await client.chat("Hi!", model="m").text()
        error = raised.value
        assert (error.reason, error.field, error.limit) == ("CONTEXT_LENGTH_EXCEEDED", "messages", 8)
        assert error.message == refused.message
        with pytest.raises(LimitExceededError) as limited:
            await client.chat("Hi!", model="m").text()
        assert limited.value.retry_after_s == 1.5
        assert len(server.asked) == 2


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_read_as_the_server_writes_it(reason: Reason) -> None:
    error = MillraceError(reason, "why", field="a.b", metadata={"limit": "3"}, retry_after_s=0.25)
    details = read_details(to_status(error).SerializeToString())
    assert (details.reason, details.field) == (reason.value, "a.b")
    assert (details.metadata, details.retry_after_s) == ({"limit": "3"}, 0.25)


def test_details_that_cannot_be_read_say_nothing() -> None:
    assert read_details(b"\xff\xff").reason == ""


async def test_a_server_that_fails_in_its_own_way_is_an_error_of_the_client() -> None:
    async with served() as (server, client):
        server.script = [[], []]
        with pytest.raises(InternalServerError):
            await client.embed("x", model="m")


@pytest.mark.parametrize("leave", ["cancel", "block", "task"])
async def test_leaving_an_answer_ends_it_at_the_server(leave: str) -> None:
    async with served() as (server, client):
        server.script = [[part("He"), WAIT]]
        answer = client.chat("Hi!", model="m")

        async def read() -> list[str]:
            return [each.choices[0].content async for each in answer]

        if leave == "block":
            async with answer:
                await anext(answer)
        else:
            task = asyncio.create_task(read())
            while not answer.request_id:
                await asyncio.sleep(0.005)
            if leave == "cancel":
                answer.cancel()
                assert await task == ["He"]
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        await server.was_cancelled.wait()
        assert [each async for each in answer] == []


async def test_closing_the_client_ends_its_answers_with_an_error_of_their_own() -> None:
    async with served() as (server, client):
        server.script = [[part("He"), WAIT]]
        answer = client.chat("Hi!", model="m")
        await anext(answer)
        task = asyncio.create_task(answer.text())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(CallCancelledError, match="the client was closed"):
            await task


async def test_closing_the_client_ends_its_calls_with_the_same_error() -> None:
    async with served() as (server, client):
        server.script = [[WAIT]]
        task = asyncio.create_task(client.embed("text", model="m"))
        while not server.asked:
            await asyncio.sleep(0.005)
        await client.close()
        with pytest.raises(CallCancelledError, match="the client was closed"):
            await task


async def test_a_deadline_ends_the_answer() -> None:
    async with served() as (server, client):
        server.script = [[part("He"), WAIT]]
        with pytest.raises(DeadlineExceededError):
            await client.chat("Hi!", model="m", timeout_s=0.2).text()


async def test_generate_takes_texts_and_tokens_and_options_where_they_are() -> None:
    async with served() as (server, client):
        server.script = [
            [inference_pb2.GenerateResponse(choices=[{"text": "a"}, {"index": 1, "text": "b"}])]
        ] * 2
        answer: AnswerStream[Any] = client.generate("once", model="m", echo=True, n=2)
        assert await answer.text() == "a"
        await client.generate([1, 2], model="m", response_format={"regex": "a+"}).text()
    by_text, by_ids = server.asked
    assert (by_text.text, by_text.echo, by_text.sampling.n) == ("once", True, 2)
    assert (list(by_ids.token_ids.ids), by_ids.response_format.regex) == ([1, 2], "a+")


async def test_a_conversation_has_roles_tools_and_its_own_options() -> None:
    async with served() as (server, client):
        server.script = [[part("x")]]
        messages = [{"role": "system", "content": "Be brief."}, chat_pb2.Message(content="raw")]
        await client.chat(messages, model="m", tools=[{"name": "add"}], parallel_tool_calls=False).text()
    conversation = server.asked[0].conversation
    assert [each.role for each in conversation.messages] == [chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_UNSPECIFIED]
    assert conversation.tools[0].name == "add"
    assert conversation.HasField("parallel_tool_calls")


_BAD: list[tuple[Callable[[MillraceClient], object], str]] = [
    (lambda client: client.chat("x", model="m", tempreture=1), "tempreture: no such option; there are"),
    (lambda client: client.chat("x", model="m", max_tokens="many"), "max_tokens: 'many' is not of its kind"),
    (lambda client: client.chat([{"role": "boss"}], model="m"), r"messages\[0\]: expected role"),
    (
        lambda client: client.chat("x", model="m", timeout_s=0),
        "timeout_s: 0 is not a number of seconds above 0",
    ),
    (lambda _: MillraceClient("ftp://x", "k"), "url: 'ftp://x' is not"),
    (lambda _: MillraceClient("http://x:99999", "k"), "url: .* is not"),
    (lambda _: MillraceClient("http://x/v1", "k"), "url: .* is not"),
    (lambda _: MillraceClient("x:1", "ä"), "api_key: it is empty, or has other than visible"),
    (lambda _: MillraceClient("x:1", "k", tls=TlsFiles()), "tls: 'x:1' is asked without TLS; write https://"),
    (
        lambda _: MillraceClient("https://x", "k", tls=TlsFiles(authorities="/no")),
        "authorities: /no cannot be read",
    ),
    (lambda _: MillraceClient("https://x", "k", tls=TlsFiles(key="/no")), "certificate, key: one is given"),
    (lambda _: RetryPolicy(attempts=0), "attempts: 0 is not from 1 to 100"),
    (lambda _: RetryPolicy(first_pause_s=9), "first_pause_s, longest_pause_s: 9 and 5"),
]


@pytest.mark.parametrize(("ask", "said"), _BAD)
async def test_what_cannot_be_sent_is_refused_by_its_name(
    ask: Callable[[MillraceClient], object], said: str
) -> None:
    async with served() as (server, client):
        with pytest.raises(ValueError, match=said):
            ask(client)
        assert server.asked == []


def test_every_method_of_the_service_has_one_of_the_client() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    names = {re.sub(r"(?<!^)([A-Z])", r"_\1", each.name).lower() for each in service.methods}
    assert names - {"list_models"} | {"models"} <= set(dir(MillraceClient))


def test_every_class_of_errors_is_one_of_the_clients() -> None:
    named = [getattr(millrace_client, name) for name in millrace_client.__all__ if name.endswith("Error")]
    assert all(issubclass(each, MillraceApiError) for each in named)
    assert {each.__name__ for each in MillraceApiError.__subclasses__()} < set(millrace_client.__all__)


def test_the_wheel_asks_for_what_its_stubs_were_generated_for() -> None:
    """Its version is that of the suite, with which it is released."""
    project = tomllib.loads((ROOT / "client/pyproject.toml").read_text(encoding="utf-8"))["project"]
    stubs = ROOT / "contract/stubs/millrace/inference/v1"
    messages = (stubs / "inference_pb2.py").read_text(encoding="utf-8")
    calls = (stubs / "inference_pb2_grpc.py").read_text(encoding="utf-8")
    (protobuf,) = re.findall(r"# Protobuf Python Version: ([\d.]+)", messages)
    (grpcio,) = re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", calls)
    # Generated code is read by the runtime of its own and of the next major version.
    following = int(protobuf.split(".")[0]) + 2
    assert project["dependencies"] == [f"grpcio>={grpcio}", f"protobuf>={protobuf},<{following}"]
    suite = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert millrace_client.__version__ == suite["version"]
