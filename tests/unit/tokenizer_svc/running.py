"""The service as a process of its own, and what is asked of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from millrace.common.v1 import chat_pb2, context_pb2
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from contract.errors import MillraceError
from contract.proto.status import from_rpc_error
from gateway.tokenizer.stream import PrepareStreams
from runtime.context import sign

SECRET = "a secret of the tests"


class Service:
    """A running `python -m tokenizer_svc`."""

    def __init__(self, path: Path, **settings: str) -> None:
        environment = {
            **os.environ,
            "MILLRACE_MODEL__PATH": str(path),
            "MILLRACE_MODEL__NAME": "small",
            "MILLRACE_MODEL__ALIASES": '["tiny"]',
            "MILLRACE_SECURITY__CONTEXT_SECRET": SECRET,
            "MILLRACE_TOKENIZER__LISTEN": "127.0.0.1:0",
            # No message but answers, however long they take.
            "MILLRACE_HEALTH__SILENCE_LIMIT_S": "3600",
            **settings,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenizer_svc"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        self.target = self.ready.partition("grpc=")[2].split()[0]
        self.channel = grpc.insecure_channel(self.target)
        self.stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)

    def stop(self) -> int:
        self.channel.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


@contextmanager
def limited_service(path: Path) -> Iterator[Service]:
    """The service with metrics and small limits; ends well at the end."""
    running = Service(
        path,
        MILLRACE_TOKENIZER__METRICS_LISTEN="127.0.0.1:0",
        MILLRACE_TOKENIZER__LIMITS__MAX_MESSAGES="8",
        MILLRACE_TOKENIZER__LIMITS__MAX_PROMPT_BYTES="20000",
        MILLRACE_TOKENIZER__LIMITS__MAX_GRAMMAR_BYTES="5000",
    )
    yield running
    assert running.stop() == 0


def signed(**fields: Any) -> context_pb2.SignedContext:
    context = context_pb2.RequestContext(
        request_id="r1", tenant="acme", issued_unix_ms=round(time.time() * 1000), **fields
    )
    return sign(context, SECRET.encode())


def user(content: str) -> chat_pb2.Conversation:
    return chat_pb2.Conversation(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content=content)])


def refused(call: Any, request: Any) -> MillraceError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request)
    return from_rpc_error(caught.value)


async def prepared_by_stream(target: str, *texts: str) -> list[list[int]]:
    """Ids of texts that are prepared at once, as gateways do it."""
    streams = PrepareStreams(target)
    try:
        answers = await asyncio.gather(
            *(
                streams.call(
                    tokenizer_pb2.PrepareRequest(context=signed(), text=text).SerializeToString(),
                    "",
                    "",
                    60.0,
                )
                for text in texts
            )
        )
        return [list(answer.token_ids) for answer in answers]
    finally:
        await streams.close()
