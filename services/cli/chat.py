"""`millrace chat`: a conversation in the terminal, streamed token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from millrace.common.v1 import chat_pb2, output_pb2
from rich.console import Console

from contract.errors import MillraceError, Reason
from services.cli.inference import InferenceClient, told_defaults
from services.cli.owners import remember_request
from services.cli.repetition import RepetitionWatch

# Before each attempt to go on with an answer that was cut; an edge is back within seconds.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)

# Longest answer unless --max-tokens says another: a model that babbles would go on to its context's end.
MAX_TOKENS = 1024

_COMMANDS = "/reset forgets the conversation, /quit (or Ctrl-D) ends it, Ctrl-C stops an answer"


class ChatSession:
    """Turns so far, and how the next answer is obtained and shown."""

    def __init__(
        self, client: InferenceClient, fields: Mapping[str, Any], system: str, out: Console, notes: Console
    ) -> None:
        """Answers are written to `out`; counts and times to `notes`. Every request has `fields`."""
        self._client = client
        sampling = fields.get("sampling", {})
        self._is_bounded = sampling.get("max_tokens") is None
        self._fields = (
            {**fields, "sampling": {**sampling, "max_tokens": MAX_TOKENS}} if self._is_bounded else fields
        )
        self._form = fields.get("response_format", chat_pb2.ResponseFormat())
        self._system = system
        self._out = out
        self._notes = notes
        self._messages: list[chat_pb2.Message] = []
        self.reset()

    def tell_defaults(self) -> None:
        """Says by what tokens are drawn that the user has said nothing of, and who says so."""
        told = told_defaults(self._client.model(self._fields["model"]), self._fields["sampling"])
        if told:
            self._notes.print(told, style="dim", markup=False, highlight=False, soft_wrap=True)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        system = chat_pb2.Message(role=chat_pb2.ROLE_SYSTEM, content=self._system)
        self._messages = [system] if self._system else []

    def ask(self, text: str) -> str:
        """Streams the answer to `text` and keeps both. An interrupted answer is kept as far as it came.

        Raises MillraceError, and the question is forgotten then.
        """
        self._messages.append(chat_pb2.Message(role=chat_pb2.ROLE_USER, content=text))
        pieces: list[str] = []
        try:
            self._stream_whole(pieces)
        except MillraceError:
            self._messages.pop()
            raise
        except KeyboardInterrupt:
            self._notes.print("\n(stopped)", style="dim")
        answer = "".join(pieces)
        self._messages.append(chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, content=answer))
        return answer

    def _stream_whole(self, pieces: list[str]) -> None:
        """Goes on where an answer was cut because its gateway, or the edge, was lost."""
        pauses_s = iter(_PAUSES_S)
        while True:
            try:
                self._stream(pieces)
            except MillraceError as error:
                if self._is_bounded and error.reason is Reason.CONTEXT_LENGTH_EXCEEDED and not pieces:
                    # Fewer tokens than the bound are left of the context, which then is the bound.
                    self._unbound()
                    continue
                pause_s = next(pauses_s, None)
                is_lost = error.reason is Reason.ENGINE_UNAVAILABLE and pieces
                # A grammar would begin again in the middle.
                if not is_lost or self._form.WhichOneof("format") or pause_s is None:
                    raise
                time.sleep(pause_s)
            else:
                return

    def _unbound(self) -> None:
        self._is_bounded = False
        self._fields = {**self._fields, "sampling": {**self._fields["sampling"], "max_tokens": None}}

    def _stream(self, pieces: list[str]) -> None:
        begun = chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, content="".join(pieces))
        messages = [*self._messages, begun] if pieces else self._messages
        conversation = chat_pb2.Conversation(messages=messages, continue_final_message=bool(pieces) or None)
        started_s = time.monotonic()
        first_s = 0.0
        usage: output_pb2.Usage | None = None
        request_id = ""
        finish_reason = output_pb2.FINISH_REASON_UNSPECIFIED
        watch, repeats = RepetitionWatch(), False
        # Closing it takes the rest of an answer back that repeats itself.
        with closing(self._client.chat(conversation=conversation, **self._fields)) as responses:
            for response in responses:
                request_id = response.request_id
                for choice in response.choices:
                    if choice.reasoning:
                        self._notes.print(choice.reasoning, style="dim", end="", markup=False)
                    if choice.content:
                        first_s = first_s or time.monotonic()
                        pieces.append(choice.content)
                        _write(self._out, choice.content)
                    finish_reason = choice.finish_reason or finish_reason
                    repeats = repeats or watch.repeats(choice.reasoning + choice.content)
                if response.HasField("usage"):
                    usage = response.usage
                if repeats:
                    break
        remember_request(request_id)
        _write(self._out, "\n")
        if repeats:
            self._notes.print("(ended: it repeats itself)", style="dim")
        if self._is_bounded and finish_reason == output_pb2.FINISH_REASON_LENGTH:
            self._notes.print(f"(ended after {MAX_TOKENS:,} tokens; --max-tokens allows more)", style="dim")
        if usage is not None and self._notes.is_terminal:
            self._notes.print(_statistics(usage, started_s, first_s), style="dim", highlight=False)


def talk(conversation: ChatSession, read: Callable[[str], str], notes: Console) -> None:
    """Reads and answers lines until /quit or the end of input."""
    conversation.tell_defaults()
    notes.print(_COMMANDS, style="dim")
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            notes.print()
            return
        if line in {"/quit", "/exit"}:
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            notes.print(f"unknown command {line.split()[0]}; {_COMMANDS}", style="dim", markup=False)
        elif line:
            try:
                conversation.ask(line)
            except MillraceError as error:
                notes.print(error.message, style="red", markup=False)


def _write(out: Console, text: str) -> None:
    # Not through rich: it would wrap and highlight what the model wrote.
    out.file.write(text)
    out.file.flush()


def _statistics(usage: output_pb2.Usage, started_s: float, first_s: float) -> str:
    ended_s = time.monotonic()
    parts = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"]
    if first_s:
        parts.append(f"first text after {(first_s - started_s) * 1e3:.0f} ms")
    if first_s and usage.completion_tokens > 1:
        parts.append(f"{(usage.completion_tokens - 1) / max(ended_s - first_s, 1e-9):.0f} tokens/s")
    return ", ".join(parts)
