"""The thin server around OpenVINO GenAI. It runs in the peer's environment, so it imports nothing of ours.

`python openvino_server.py MODEL PORT KV_GIB`
"""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import json
import sys
import threading

import numpy as np
import openvino as ov
import openvino_genai as genai
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route


class Pipeline:
    """One thread steps the pipeline; outputs go to the event loop's queues."""

    def __init__(self, model: str, kv_gib: int) -> None:
        config = genai.SchedulerConfig()
        config.cache_size = kv_gib
        config.max_num_seqs = 64
        config.enable_prefix_caching = True
        self.pipe = genai.ContinuousBatchingPipeline(
            model, config, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"}
        )
        self.tokenizer = self.pipe.get_tokenizer()
        self.lock = threading.Lock()
        self.wake = threading.Event()
        self.live = {}
        self.count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, ids, max_tokens, queue, loop) -> None:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = max_tokens
        settings.ignore_eos = True
        with self.lock:
            self.count += 1
            handle = self.pipe.add_request(self.count, ov.Tensor(np.array([ids], dtype=np.int64)), settings)
            self.live[self.count] = (handle, queue, loop)
        self.wake.set()

    def _run(self) -> None:
        while True:
            if not self.pipe.has_non_finished_requests():
                self.wake.wait()
                self.wake.clear()
                continue
            with self.lock:
                self.pipe.step()
                for number, (handle, queue, loop) in list(self.live.items()):
                    if not handle.can_read():
                        if handle.get_status() != genai.GenerationStatus.RUNNING:
                            loop.call_soon_threadsafe(queue.put_nowait, None)
                            del self.live[number]
                        continue
                    for output in handle.read().values():
                        loop.call_soon_threadsafe(queue.put_nowait, list(output.generated_ids))
                    if handle.get_status() != genai.GenerationStatus.RUNNING:
                        loop.call_soon_threadsafe(queue.put_nowait, None)
                        del self.live[number]


def main() -> None:
    model, port, kv_gib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pipeline = Pipeline(model, kv_gib)

    async def completions(request):
        body = await request.json()
        queue = asyncio.Queue()
        pipeline.add(body["prompt"], body["max_tokens"], queue, asyncio.get_running_loop())

        async def events():
            count = 0
            while (ids := await queue.get()) is not None:
                count += len(ids)
                text = pipeline.tokenizer.decode(ids)
                yield "data: " + json.dumps({"choices": [{"index": 0, "text": text}]}) + "\n\n"
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            yield "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def models(_request):
        return JSONResponse({"data": [{"id": "model"}]})

    async def health(_request):
        return PlainTextResponse("ok")

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="warning")


if __name__ == "__main__":
    main()
