"""A model that pools: its tokenizer service, and an engine that answers texts with their lengths."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import Any

from millrace.common.v1 import output_pb2
from millrace.engine.v1 import engine_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from contract.proto.status import to_detail
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import FINGERPRINT, encode


@dataclass(eq=False)
class PoolingEngine(ScriptedEngine):
    """Answers each text with its length and its first id; of scores with a tenth of the length."""

    # Texts of all submissions that are answered before the gate opens, and those before its streams end.
    ungated: int = 0
    dies_after_texts: int = -1
    # Texts, by their handle, that have no answer yet, and ids of all texts in the order in which they came.
    left: dict[int, list[int]] = field(default_factory=dict)
    read: list[list[int]] = field(default_factory=list)

    async def _serve_choice(self, submit: engine_pb2.Submit, choice: int, outputs: Any) -> None:
        start, texts = 0, list(submit.pooling.texts)
        self.left[submit.handle] = [text.index for text in texts]
        for text in texts:
            if len(self.read) >= self.ungated:
                await self.gate.wait()
            ids = list(submit.prompt_token_ids[start : start + text.num_tokens])
            start += text.num_tokens
            if len(self.read) == self.dies_after_texts:
                outputs.put_nowait(None)
                return
            self.read.append(ids)
            self.left[submit.handle].remove(text.index)
            outputs.put_nowait(self._output(submit, text.index, ids))
            await asyncio.sleep(0)

    def _output(self, submit: engine_pb2.Submit, index: int, ids: list[int]) -> engine_pb2.RequestOutput:
        output = engine_pb2.RequestOutput(handle=submit.handle, choice_index=index)
        if ids == encode("poison"):
            error = MillraceError(Reason.POISONED_REQUEST, "the model's hidden states are not finite")
            output.finish_reason = output_pb2.FINISH_REASON_ERROR
            output.error.CopyFrom(to_detail(error))
            return output
        values = (len(ids) / 10,) if submit.pooling.task == "score" else (float(len(ids)), float(ids[0]))
        output.finish_reason = output_pb2.FINISH_REASON_STOP
        output.pooled = struct.pack(f"<{len(values)}f", *values)
        output.statistics.num_steps = 1
        return output

    def _take(self, message: Any, outputs: Any, tasks: dict[int, asyncio.Task[None]]) -> None:
        if message.HasField("cancel"):
            # As an engine does: a last word for each text.
            for index in self.left.pop(message.cancel.handle, ()):
                ended = engine_pb2.RequestOutput(handle=message.cancel.handle, choice_index=index)
                ended.finish_reason = output_pb2.FINISH_REASON_CANCELLED
                ended.statistics.num_steps = self.steps_when_cancelled
                outputs.put_nowait(ended)
            tasks.pop(message.cancel.handle).cancel()
            self.cancels.append(message.cancel)
            return
        super()._take(message, outputs, tasks)


class PoolingTokenizer(ByteTokenizer):
    """Of a checkpoint that pools; a pair's texts follow each other."""

    def __init__(self, **says: Any) -> None:
        super().__init__()
        self.says: dict[str, Any] = {"tasks": ["embed"], "num_dimensions": 2, **says}

    async def GetVocabulary(self, request: Any, context: Any) -> Any:
        vocabulary = await super().GetVocabulary(request, context)
        vocabulary.pooled.CopyFrom(tokenizer_pb2.PooledModel(**self.says))
        return vocabulary

    async def Prepare(self, request: Any, context: Any) -> Any:
        if request.WhichOneof("input") != "texts":
            return await super().Prepare(request, context)
        self.prepared.append(request)
        response = tokenizer_pb2.PrepareResponse(vocabulary_fingerprint=FINGERPRINT)
        for index, each in enumerate(request.texts.texts):
            if each.text == "impossible":
                problem = MillraceError(Reason.INVALID_ARGUMENT, "no such text", field=f"texts[{index}]")
                raise problem
            ids = list(each.encoded.ids) or encode(each.text)
            second_start = len(ids) if each.HasField("pair") else 0
            ids += encode(each.pair)
            response.token_ids.extend(ids)
            response.texts.add(num_tokens=len(ids), second_start=second_start)
        return response
