"""An engine that answers with the reply that a test gave it, a token per step, over the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.common.v1 import output_pb2
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from contract.errors import MillraceError, Reason, invalid
from contract.proto.status import to_detail
from tests.unit.gateway.rig.vocabulary import END_ID, FINGERPRINT, encode

Reply = Callable[[engine_pb2.Submit, int], list[int]]


def hello(submit: engine_pb2.Submit, choice: int) -> list[int]:
    """The reply of an engine whose test does not care."""
    return [*encode(f"hello {choice}"), END_ID]


def adapter(name: str, path: str, generation: int = 0) -> engine_pb2.Adapter:
    """A name that stands for what is in a folder."""
    return engine_pb2.Adapter(name=name, path=path, version=path[::-1], generation=generation)


@dataclass(eq=False)
class ScriptedEngine(engine_pb2_grpc.EngineServiceServicer):
    """`reply` gives the tokens of a choice. Steps wait for `gate` and take `step_s`."""

    name: str = "engine-0"
    reply: Reply = hello
    step_s: float = 0.0
    tokens_per_step: int = 1
    max_model_len: int = 4096
    fingerprint: str = FINGERPRINT
    model: str = "tiny"
    revision: str = ""
    # Configured ones; a folder's version is its path backwards.
    adapters: tuple[str, ...] = ()
    # Folders that it cannot read.
    unreadable: tuple[str, ...] = ()
    # What names stand for, and those of them that are in memory.
    names: dict[str, engine_pb2.Adapter] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    # Changes wait for the first; what gateways hear of them, for the second.
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    tells: asyncio.Event = field(default_factory=asyncio.Event)
    telling: asyncio.Task[None] | None = None
    streams: set[asyncio.Queue[Any]] = field(default_factory=set)
    pool: str = ""
    role: str = ""
    # Tickets under which it may let go what it holds.
    released: list[bytes] = field(default_factory=list)
    # Sampling options that it refuses, by name.
    unsupported: tuple[str, ...] = ()
    # Refuses every submission with this error.
    refusal: MillraceError | None = None
    submissions: list[engine_pb2.Submit] = field(default_factory=list)
    cancels: list[engine_pb2.Cancel] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    # Set whenever a cancellation arrives or a submission ends.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_running: int = 0
    # Tokens that it has told.
    num_generated: int = 0
    # Steps that a submission has had when it is cancelled.
    steps_when_cancelled: int = 0
    # Of candidates that are not returned, told with the first choice's end or the answer to a cancellation.
    # All but one are told before the first token, too.
    candidate_tokens: int = 0
    # Minus the log-probability of a choice's token at a place, and of its only alternative; its confidence.
    surety: Callable[[int, int], float] = lambda choice, place: 0.5
    # What every end of a choice tells to have taken.
    engine_s: float = 0.0
    # Share of its attention that every token tells to have lost.
    lost_share: float = 0.0
    # Causes that every end of a choice tells to have held it back.
    delayed_by_s: dict[str, float] = field(default_factory=dict)
    # Ends the stream of every gateway after this many tokens in all; -1 never does.
    dies_after_tokens: int = -1
    # Closes its gate when it has told so many; 0 never does.
    pauses_at_tokens: int = 0

    def __post_init__(self) -> None:
        for event in (self.gate, self.answers, self.tells):
            event.set()
        self.restart()

    def restart(self) -> None:
        """It knows what it was configured with, and no more."""
        self.names = {name: adapter(name, f"/configured/{name}") for name in self.adapters}

    @property
    def paths(self) -> dict[str, str]:
        """Folders of what names stand for."""
        return {each.name: each.path for each in self.names.values() if each.version}

    async def CheckAdapter(self, request: Any, context: Any) -> engine_pb2.CheckAdapterResponse:
        if request.path in self.unreadable:
            raise invalid("path", f"{self.name} finds nothing at {request.path}")
        return engine_pb2.CheckAdapterResponse(version=request.path[::-1])

    async def AddAdapter(self, request: Any, context: Any) -> engine_pb2.AddAdapterResponse:
        await self.CheckAdapter(request, context)
        await self._put(adapter(request.name, request.path, request.generation))
        return engine_pb2.AddAdapterResponse()

    async def RemoveAdapter(self, request: Any, context: Any) -> engine_pb2.RemoveAdapterResponse:
        await self._put(engine_pb2.Adapter(name=request.name, generation=request.generation))
        return engine_pb2.RemoveAdapterResponse()

    async def _put(self, new: engine_pb2.Adapter) -> None:
        await self.answers.wait()
        if new.name not in self.names or new.generation > self.names[new.name].generation:
            self.names[new.name] = new
            self.telling = asyncio.create_task(self.tell_adapters())

    async def tell_adapters(self) -> None:
        """Gateways hear what names stand for."""
        await self.tells.wait()
        for stream in self.streams:
            stream.put_nowait(self.told())

    def told(self) -> engine_pb2.Adapters:
        """What names stand for, as gateways hear it."""
        for each in self.names.values():
            each.loaded = each.name in self.loaded
        return engine_pb2.Adapters(names=self.names.values())

    async def Attach(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        first = await anext(requests)
        if first.hello.vocabulary_fingerprint not in ("", self.fingerprint):
            raise MillraceError(Reason.VOCABULARY_MISMATCH, f"{self.name} has another vocabulary")
        welcome = engine_pb2.Welcome(info=self._info(), adapters=self.told())
        yield engine_pb2.AttachResponse(welcome=welcome)
        outputs: asyncio.Queue[engine_pb2.RequestOutput | engine_pb2.Adapters | None] = asyncio.Queue()
        self.streams.add(outputs)
        tasks: dict[int, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read(requests, outputs, tasks))
        try:
            alive = True
            while alive:
                step = engine_pb2.StepOutputs()
                piece = await outputs.get()
                while piece is not None:
                    if isinstance(piece, engine_pb2.Adapters):
                        step.adapters.CopyFrom(piece)
                    else:
                        step.outputs.append(piece)
                    if outputs.empty():
                        break
                    piece = outputs.get_nowait()
                alive = piece is not None
                step.load.num_running = self.num_running
                step.load.num_total_blocks = 100
                step.load.num_free_blocks = 100
                yield engine_pb2.AttachResponse(outputs=step)
            raise MillraceError(Reason.ENGINE_UNAVAILABLE, "killed by the test")
        finally:
            self.streams.discard(outputs)
            reader.cancel()
            for task in tasks.values():
                task.cancel()

    async def _read(self, requests: Any, outputs: Any, tasks: dict[int, asyncio.Task[None]]) -> None:
        async for message in requests:
            for each in message.several.requests if message.HasField("several") else [message]:
                self._take(each, outputs, tasks)

    def _take(self, message: Any, outputs: Any, tasks: dict[int, asyncio.Task[None]]) -> None:
        if message.HasField("submit"):
            submit = message.submit
            self.submissions.append(submit)
            tasks[submit.handle] = asyncio.create_task(self._serve(submit, outputs))
            return
        if message.HasField("release"):
            self.released.append(message.release.ticket)
            self.changed.set()
            return
        self.cancels.append(message.cancel)
        task = tasks.pop(message.cancel.handle, None)
        if task is not None:
            task.cancel()
            ended = engine_pb2.RequestOutput(
                handle=message.cancel.handle, finish_reason=output_pb2.FINISH_REASON_CANCELLED
            )
            ended.statistics.num_steps = self.steps_when_cancelled
            ended.statistics.candidate_tokens = self.candidate_tokens
            ended.statistics.engine_time.decode_s = self.engine_s
            later = 0.0
            if self.candidate_tokens:
                # Of a step before, and on its way.
                news = engine_pb2.RequestOutput(handle=message.cancel.handle, withheld_tokens=1)
                outputs.put_nowait(news)
                later = 0.02
            asyncio.get_running_loop().call_later(later, outputs.put_nowait, ended)
        self.changed.set()

    async def _serve(self, submit: engine_pb2.Submit, outputs: Any) -> None:
        if self.refusal is not None:
            outputs.put_nowait(
                engine_pb2.RequestOutput(
                    handle=submit.handle,
                    finish_reason=output_pb2.FINISH_REASON_ERROR,
                    error=to_detail(self.refusal),
                )
            )
            return
        if self.candidate_tokens:
            so_far = self.candidate_tokens - 1
            outputs.put_nowait(engine_pb2.RequestOutput(handle=submit.handle, withheld_tokens=so_far))
        self.num_running += 1
        try:
            for offset in range(submit.sampling.n):
                await self._serve_choice(submit, submit.choice_index + offset, outputs)
        finally:
            self.num_running -= 1
            self.changed.set()

    @staticmethod
    def _say_how_sure(
        submit: engine_pb2.Submit, output: engine_pb2.RequestOutput, surety: list[float]
    ) -> None:
        if submit.sampling.HasField("logprobs"):
            for token, each in zip(output.token_ids, surety, strict=True):
                drawn = output_pb2.TokenLogprob(token_id=token, logprob=-each)
                # Where alternatives are asked for, a token is the only one of its own.
                top = [drawn] if submit.sampling.logprobs else []
                output.logprobs.add(token_id=token, logprob=-each, top=top)
        if submit.confidence_top:
            output.confidences.extend(surety)

    async def _serve_choice(self, submit: engine_pb2.Submit, choice: int, outputs: Any) -> None:
        tokens = self.reply(submit, choice)
        done = len(submit.output_token_ids)
        limit = 1 if submit.hand_over else submit.sampling.max_tokens
        # The first output of a request tells about its prompt; choices come one after another.
        any_told = choice != submit.choice_index
        while True:
            await self.gate.wait()
            if self.step_s:
                await asyncio.sleep(self.step_s)
            piece = tokens[done : min(done + self.tokens_per_step, limit)]
            output = engine_pb2.RequestOutput(handle=submit.handle, choice_index=choice, token_ids=piece)
            self._say_how_sure(
                submit, output, [self.surety(choice, done + place) for place in range(len(piece))]
            )
            if not any_told:
                output.first_token.queue_s = 0.001
                output.first_token.cached_prompt_tokens = 1
                if submit.sampling.HasField("prompt_logprobs"):
                    output.prompt_logprobs.extend(
                        output_pb2.TokenLogprob(token_id=token, logprob=-0.25)
                        for token in submit.prompt_token_ids[1:]
                    )
                any_told = True
            done += len(piece)
            stops = set(submit.sampling.stop_token_ids)
            if piece and piece[-1] in stops:
                output.finish_reason = output_pb2.FINISH_REASON_STOP
                output.stop_token_id = piece[-1]
            elif done >= min(limit, len(tokens)):
                output.finish_reason = output_pb2.FINISH_REASON_LENGTH
            if output.finish_reason:
                output.statistics.num_steps = done
                output.statistics.engine_time.decode_s = self.engine_s
                output.statistics.delayed_by_s.update(self.delayed_by_s)
                output.statistics.lost_tokens = self.lost_share * done
                if choice == submit.choice_index:
                    output.statistics.candidate_tokens = self.candidate_tokens
            if self._dies(len(piece)):
                outputs.put_nowait(None)
                return
            outputs.put_nowait(output)
            self.num_generated += len(piece)
            if 0 < self.pauses_at_tokens <= self.num_generated:
                self.pauses_at_tokens = 0
                self.gate.clear()
            if output.finish_reason:
                return
            await asyncio.sleep(0)

    def _dies(self, num_tokens: int) -> bool:
        if self.dies_after_tokens < 0:
            return False
        self.dies_after_tokens -= num_tokens
        return self.dies_after_tokens < 0

    def _info(self) -> engine_pb2.EngineInfo:
        return engine_pb2.EngineInfo(
            engine_id=self.name,
            model=self.model,
            revision=self.revision,
            pool=self.pool,
            role=self.role,
            unsupported=self.unsupported,
            vocabulary_fingerprint=self.fingerprint,
            max_model_len=self.max_model_len,
            block_size=16,
            num_blocks=100,
            max_num_seqs=8,
            max_num_batched_tokens=256,
        )
