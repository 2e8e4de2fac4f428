"""The thin server around transformers' continuous batching. It runs in the peer's environment, so it imports
nothing of ours.

`python transformers_server.py MODEL PORT KV_GIB`
"""

# mypy: ignore-errors
from __future__ import annotations

import asyncio
import itertools
import json
import sys

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

MAX_SEQUENCES = 64
# On a CPU every row attends to the keys of the whole batch under a mask, so rows of a prompt cost more beside
# more sequences.
MAX_BATCH_TOKENS = 512
PAGE_TOKENS = 256


def start_batching(model, kv_gib):
    """Its manager with a thread of its own, and a cache of `kv_gib`."""
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    page_bytes = 2 * PAGE_TOKENS * text.num_key_value_heads * head_dim * model.dtype.itemsize
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, eos_token_id=model.generation_config.eos_token_id, max_new_tokens=16
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=kv_gib * 2**30 // (page_bytes * text.num_hidden_layers),
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=MAX_SEQUENCES,
        ),
    )
    manager.start()
    return manager


def main() -> None:
    folder, port, kv_gib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    manager = start_batching(model, kv_gib)
    numbers = itertools.count()

    async def completions(request):
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = tokenizer(prompt)["input_ids"]
        if body.get("temperature", 1) != 0 or not body.get("stream"):
            return JSONResponse({"error": {"message": "only streamed, greedy answers are served"}}, 400)
        max_tokens = body.get("max_tokens", 16)
        name, queue = f"request-{next(numbers)}", asyncio.Queue()
        manager.register_result_handler(name, queue.put_nowait)
        manager.add_request(
            prompt,
            request_id=name,
            max_new_tokens=max_tokens,
            streaming=True,
            eos_token_id=-1 if body.get("ignore_eos") else None,
        )

        async def events():
            count, finished = 0, False
            try:
                while not finished:
                    output = await queue.get()
                    finished = output.is_finished()
                    if output.error is not None:
                        yield _event({"error": {"message": output.error}})
                        return
                    # Outputs hold everything so far; the same one may come twice.
                    text = tokenizer.decode(output.generated_tokens[count:])
                    count = len(output.generated_tokens)
                    choice = {"index": 0, "text": text}
                    if finished:
                        choice["finish_reason"] = "length" if count >= max_tokens else "stop"
                    yield _event({"choices": [choice]})
                usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
                yield _event({"choices": [], "usage": usage})
                yield "data: [DONE]\n\n"
            finally:
                if not finished:
                    manager.cancel_request(name)

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
    try:
        uvicorn.run(Starlette(routes=routes), port=port, log_level="warning")
    finally:
        manager.stop(block=True, timeout=5)


def _event(value) -> str:
    return f"data: {json.dumps(value)}\n\n"


if __name__ == "__main__":
    main()
