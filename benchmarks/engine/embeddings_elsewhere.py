"""What `embeddings` runs in other environments: one library's embeddings of the same token ids.

    PYTHON benchmarks/engine/embeddings_elsewhere.py NAME ASKED.json FOUND.json

It imports nothing of this repository. ASKED has checkpoint, texts (token ids), threads, and how it pools;
FOUND gets the embeddings, the seconds from the first text to the last embedding after one text for warming
up, and the peak of memory. All sides but vLLM's get texts by falling length in batches of 32, padded to the
longest, as sentence-transformers makes them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH = 32


# Embeddings of texts, in their order.
Embed = Callable[[list[list[int]]], list[list[float]]]


class NotThere(Exception):
    """The library is not in this environment."""


def padded(texts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and mask of a batch, as lists."""
    longest = max(map(len, texts))
    ids = [text + [0] * (longest - len(text)) for text in texts]
    return ids, [[1] * len(text) + [0] * (longest - len(text)) for text in texts]


def in_batches(texts: list[list[int]], embed: Embed) -> list[list[float]]:
    """Embeddings in the order of the texts, by falling length."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    found: dict[int, list[float]] = {}
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        found.update(zip(some, embed([texts[index] for index in some]), strict=True))
    return [found[index] for index in range(len(texts))]


def pooled(hidden: Any, mask: Any, kind: str, *, normalized: bool) -> Any:
    """Pooling as sentence-transformers' module has it, by numpy."""
    import numpy as np

    hidden, mask = np.asarray(hidden), np.asarray(mask, np.float32)
    if kind == "cls":
        rows = hidden[:, 0]
    elif kind == "mean":
        rows = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    elif kind == "last":
        rows = hidden[np.arange(len(hidden)), mask.sum(1).astype(int) - 1]
    else:
        raise SystemExit(f"pooling {kind!r} is computed by sentence-transformers alone here")
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True) if normalized else rows


def sentence_transformers(asked: dict[str, Any]) -> Embed:
    """The library's own modules, from token ids on."""
    try:
        import sentence_transformers
    except ImportError as error:
        raise NotThere from error
    import torch

    torch.set_num_threads(asked["threads"])
    model = sentence_transformers.SentenceTransformer(asked["checkpoint"], device="cpu").eval()

    @torch.inference_mode()
    def embed(texts: list[list[int]]) -> list[list[float]]:
        ids, mask = map(torch.tensor, padded(texts))
        return model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"].tolist()

    return lambda texts: in_batches(texts, embed)


def transformers(asked: dict[str, Any]) -> Embed:
    """Its formula over transformers' model, where it is not installed."""
    import torch
    import transformers as library

    torch.set_num_threads(asked["threads"])
    model = library.AutoModel.from_pretrained(asked["checkpoint"], dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(texts: list[list[int]]) -> list[list[float]]:
        ids, mask = padded(texts)
        given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        hidden = model(**given).last_hidden_state.numpy()
        return pooled(hidden, mask, asked["kind"], normalized=asked["normalized"]).tolist()

    return lambda texts: in_batches(texts, embed)


def openvino(asked: dict[str, Any]) -> Embed:
    """OpenVINO's CPU plugin, in float32, over transformers' model."""
    try:
        import openvino as library
    except ImportError as error:
        raise NotThere from error
    import numpy as np
    import torch
    from transformers import AutoModel

    class Traced(torch.nn.Module):
        """With the mask in four dimensions, because transformers' way to one cannot be traced."""

        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(asked["checkpoint"], dtype=torch.float32).eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(
                input_ids=input_ids, attention_mask=attention_mask[:, None, None, :] > 0
            ).last_hidden_state
            return hidden

    example = {"input_ids": torch.ones(2, 8, dtype=torch.int64)}
    example["attention_mask"] = torch.ones_like(example["input_ids"])
    converted = library.convert_model(Traced(), example_input=example)
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": asked["threads"]}
    compiled = library.Core().compile_model(converted, "CPU", hints)

    def embed(texts: list[list[int]]) -> list[list[float]]:
        ids, mask = padded(texts)
        given = {"input_ids": np.array(ids), "attention_mask": np.array(mask)}
        hidden = compiled(given)[0]
        return pooled(hidden, mask, asked["kind"], normalized=asked["normalized"]).tolist()

    return lambda texts: in_batches(texts, embed)


def vllm(asked: dict[str, Any]) -> Embed:
    """vLLM's build for CPUs: all texts in one call, batched as it pleases."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Texts are longer than the window that the files of sentence-transformers name, as for all others.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    # In this process, whose memory is told.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(asked["threads"]))
    try:
        from vllm import LLM
    except ImportError as error:
        raise NotThere from error
    longest = max(map(len, asked["texts"]))
    model = LLM(asked["checkpoint"], runner="pooling", dtype="float32", max_model_len=longest)

    def embed(texts: list[list[int]]) -> list[list[float]]:
        answers = model.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
        return [answer.outputs.embedding for answer in answers]

    return embed


SIDES: dict[str, Callable[[dict[str, Any]], Embed]] = {
    "sentence-transformers": sentence_transformers,
    "transformers": transformers,
    "openvino": openvino,
    "vllm": vllm,
}


def main() -> int:
    """Exits with 3 where the library is not there."""
    name, given, told = sys.argv[1:]
    asked = json.loads(Path(given).read_text())
    try:
        embed = SIDES[name](asked)
    except NotThere:
        return 3
    texts = asked["texts"]
    embed(texts[:1])
    started_s = time.monotonic()
    embeddings = embed(texts)
    seconds = time.monotonic() - started_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(told).write_text(json.dumps({"embeddings": embeddings, "seconds": seconds, "peak_mib": peak_mib}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
