"""The same shape in transformers: its own continuous batching, and its plain forward, on the same machine."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.random_model import LLAMA_8B, TINY
from benchmarks.gpu.report import Report

TITLE = "transformers, Llama-3.1-8B's shape, random weights"


def run(gpu: Gpu, report: Report) -> None:
    """Prefill, decode with a static cache, continuous batching; each may fail alone."""
    import transformers

    report.row(what="peer", transformers=transformers.__version__)
    model = _model(gpu, transformers)
    for measure in (_prefill, _decode, _continuous):
        try:
            measure(gpu, report, model, transformers)
        except Exception as error:
            report.failed(error, what=measure.__name__.strip("_"))


def _model(gpu: Gpu, transformers: Any) -> Any:
    config = transformers.LlamaConfig(**(LLAMA_8B | (TINY if gpu.rehearses else {})))
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    kind = gpu.pick(torch.bfloat16, torch.float32)
    model = model.to_empty(device=gpu.device).to(kind)
    # Angles are computed when a model is made, which on the meta device they were not.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(gpu.device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(1.0)
    return model.eval()


def _ids(gpu: Gpu, batch: int, length: int) -> torch.Tensor:
    vocabulary = gpu.pick(LLAMA_8B["vocab_size"], TINY["vocab_size"])
    return torch.randint(0, vocabulary, (batch, length), device=gpu.device)


@torch.inference_mode()
def _prefill(gpu: Gpu, report: Report, model: Any, transformers: Any) -> None:
    length = gpu.pick(8192, 30)
    ids = _ids(gpu, 1, length)
    timing = gpu.time(lambda: model(ids, logits_to_keep=1, use_cache=False).logits, graph=False)
    report.row(what="prefill", tokens=length, ms=timing.seconds * 1e3, tokens_per_s=length / timing.seconds)


@torch.inference_mode()
def _decode(gpu: Gpu, report: Report, model: Any, transformers: Any) -> None:
    context, steps = gpu.pick(1000, 10), gpu.pick(20, 2)
    for batch in gpu.pick([1, 128], [2]):
        cache = transformers.DynamicCache()
        rows = gpu.pick(8, 1)
        model(_ids(gpu, min(batch, rows), context), past_key_values=cache, logits_to_keep=1)
        if batch > rows:
            # Histories that are equal take as long as different ones, and far less time to make.
            cache.batch_repeat_interleave(batch // rows)
        token = _ids(gpu, batch, 1)
        model(token, past_key_values=cache)
        gpu.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        gpu.synchronize()
        seconds = (time.perf_counter() - began) / steps
        report.row(
            what="decode, dynamic cache, eager",
            batch=batch,
            context=context,
            ms=seconds * 1e3,
            tokens_per_s=batch / seconds,
        )
        del cache


def _continuous(gpu: Gpu, report: Report, model: Any, transformers: Any) -> None:
    num_requests, num_in, num_out = gpu.pick((256, 1000, 128), (2, 8, 3))
    prompts = [row.tolist() for row in _ids(gpu, num_requests, num_in).cpu()]
    generation = transformers.GenerationConfig(
        max_new_tokens=num_out, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model.generation_config = generation
    began = time.perf_counter()
    results = model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(result.generated_tokens) for result in results.values())
    report.row(
        what="continuous batching",
        requests=num_requests,
        tokens_in=num_in,
        tokens_out=num_out,
        seconds=seconds,
        output_tokens_per_s=tokens / seconds,
    )
