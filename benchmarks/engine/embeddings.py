"""Embeddings of many texts: this engine beside sentence-transformers, in one run on one machine.

    python -m benchmarks.engine.embeddings CHECKPOINT [--texts 1024] [--threads N]

Texts are token ids of 5 to 400 tokens, the same for both. Each side runs in a process of its own, whose peak
memory is
told beside its rate; the time is from the first text to the last embedding, after one text for warming up.
Where sentence-transformers is not installed, its formula runs over transformers: texts by falling length in
batches of 32,
padded to the longest. The lowest cosine between both sides' embeddings says whether they computed the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

SHORTEST, LONGEST, BATCH = 5, 400, 32
Embeddings = NDArray[np.float32]


def texts_of(folder: Path, count: int) -> list[list[int]]:
    """Token ids of so many texts."""
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    random = np.random.default_rng(0)
    lengths = random.integers(SHORTEST, LONGEST + 1, count)
    return [random.integers(vocab // 10, vocab, length).tolist() for length in lengths]


def ours(folder: Path, texts: list[list[int]], threads: int) -> tuple[Embeddings, float]:
    """Scheduler and runner, as the engine's core has them, without the wire."""
    from contract.pooling import PoolingParams
    from engine.config import EngineConfig
    from engine.core import messages
    from engine.core.__main__ import make_scheduler
    from engine.core.loop import EngineLoop
    from engine.runner.build import build
    from engine.types import Request, SamplingParams
    from runtime.config import ModelConfig

    config = EngineConfig(num_threads=threads)
    model = ModelConfig(path=str(folder))
    runner, memory, facts = build(config, model, lambda stage, part: None)

    class Outputs:
        """What the loop reads and writes."""

        def __init__(self) -> None:
            self.commands: list[messages.Command] = []
            self.found: dict[int, bytes] = {}

        def receive(self, timeout_s: float) -> list[messages.Command]:
            """Everything that is asked."""
            commands, self.commands = self.commands, []
            return commands

        def send(self, message: messages.Report) -> None:
            """Keeps the outputs."""
            if isinstance(message, messages.StepDone):
                self.found |= {event.request_id: event.pooled for event in message.events}

    mailbox = Outputs()
    scheduler = make_scheduler(config, model, memory, facts)
    loop = EngineLoop(scheduler, runner, mailbox, overlap=False)

    def run(some: list[list[int]], first: int) -> None:
        for index, text in enumerate(some):
            request = Request(
                request_id=first + index,
                external_id="text",
                prompt_token_ids=tuple(text),
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                pooling=PoolingParams(),
            )
            mailbox.commands.append(messages.Submit(request))
        while mailbox.commands or scheduler.has_work:
            loop.step()

    run(texts[:1], len(texts) + 1)
    started_s = time.monotonic()
    run(texts, 1)
    seconds = time.monotonic() - started_s
    runner.close()
    return np.stack([np.frombuffer(mailbox.found[index + 1], "<f4") for index in range(len(texts))]), seconds


def theirs(folder: Path, texts: list[list[int]], threads: int) -> tuple[Embeddings, float]:
    """sentence-transformers' way: by falling length, padded in batches."""
    import torch
    import transformers

    from checkpoint.pooling import read_pooling

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    pooling = read_pooling(folder)
    assert pooling is not None, "it pools"

    @torch.inference_mode()
    def embed(some: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, some))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in some])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in some])
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        if pooling.kind == "cls":
            pooled = hidden[:, 0]
        elif pooling.kind == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        else:
            pooled = hidden[torch.arange(len(some)), mask.sum(1) - 1]
        return torch.nn.functional.normalize(pooled, dim=-1) if pooling.normalized else pooled

    embed(texts[:1])
    started_s = time.monotonic()
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    found: dict[int, Embeddings] = {}
    for start in range(0, len(order), BATCH):
        some = order[start : start + BATCH]
        found |= zip(some, embed([texts[index] for index in some]).numpy(), strict=True)
    seconds = time.monotonic() - started_s
    return np.stack([found[index] for index in range(len(texts))]), seconds


SIDES: dict[str, Callable[..., tuple[Embeddings, float]]] = {
    "millrace": ours,
    "sentence-transformers": theirs,
}


def _in_process(name: str, folder: Path, texts: list[list[int]], threads: int, answers: Any) -> None:
    embeddings, seconds = SIDES[name](folder, texts, threads)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answers.put((embeddings, seconds, peak_mib))


def main() -> int:
    """Prints a line for each side, and JSON at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    options = parser.parse_args()
    texts = texts_of(options.checkpoint, options.texts)
    num_tokens = sum(map(len, texts))
    spawned, results, found = multiprocessing.get_context("spawn"), {}, {}
    for name in SIDES:
        answers = spawned.Queue()
        arguments = (name, options.checkpoint, texts, options.threads, answers)
        process = spawned.Process(target=_in_process, args=arguments)
        process.start()
        embeddings, seconds, peak_mib = answers.get()
        process.join()
        found[name] = embeddings.astype(np.float64)
        results[name] = {"seconds": seconds, "tokens_per_s": num_tokens / seconds, "peak_mib": peak_mib}
        print(f"{name:24} {num_tokens / seconds:10.0f} tokens/s {seconds:8.2f} s {peak_mib:8.0f} MiB")
    one, other = found.values()
    cosines = (one * other).sum(1) / np.sqrt((one * one).sum(1) * (other * other).sum(1))
    results["lowest_cosine"] = float(cosines.min())
    print(f"lowest cosine {cosines.min():.8f}")
    print(msgspec.json.encode({"texts": options.texts, "tokens": num_tokens, **results}).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
