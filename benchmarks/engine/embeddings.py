"""Embeddings of many texts: this engine beside others, in one run on one machine.

    python -m benchmarks.engine.embeddings CHECKPOINT [--texts 1024] [--threads N] [--json FILE]
        [--python sentence-transformers=PATH] [--python openvino=PATH] [--python vllm=PATH]

CHECKPOINT is a folder, or a known name such as all-minilm-l6-v2. Texts are token ids of 5 to 400 tokens,
the same for all. Each side runs in a process of its own, whose peak memory is told beside its rate; the
time is from the first text to the last embedding, after one text for warming up. Others run in this
environment, or in that of the interpreter that --python names; vLLM's is found below
~/.local/share/millrace. A side that is not there is said to be so; without sentence-transformers its
formula runs over transformers. The lowest cosine with each side's embeddings says whether both computed the
same. The last line is no side: what the products of all layers alone would take at the best rate that
torch's float32 products of any of several shapes reach just then. What computes in float32 has little left to
gain near it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from checkpoint.files import find
from checkpoint.pooling import read_pooling

SHORTEST, LONGEST = 5, 400
# What a side exits with whose library is not in its environment.
NOT_THERE = 3
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


def _ours_in_process(folder: Path, texts: list[list[int]], threads: int, answers: Any) -> None:
    embeddings, seconds = ours(folder, texts, threads)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answers.put({"embeddings": embeddings, "seconds": seconds, "peak_mib": peak_mib})


def _apart(target: Callable[..., None], *given: Any) -> Any:
    """What a function puts into the queue that is its last argument, in a process of its own."""
    spawned = multiprocessing.get_context("spawn")
    answers = spawned.Queue()
    process = spawned.Process(target=target, args=(*given, answers))
    process.start()
    found = answers.get()
    process.join()
    return found


def products_flop(folder: Path, texts: list[list[int]]) -> float:
    """Floating point operations of projections and attention of a BERT-shaped encoder."""
    config = json.loads((folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    each = [len(text) * 2 * (4 * hidden + 2 * inner) * hidden + 4 * len(text) ** 2 * hidden for text in texts]
    return float(config["num_hidden_layers"] * sum(each))


def _best_rate(threads: int, answers: Any) -> None:
    """Floating point operations a second of the fastest of torch's float32 products."""
    import torch

    torch.set_num_threads(threads)
    rates = []
    for rows, inner, columns in (
        (4096, 384, 1536),
        (4096, 1536, 384),
        (2048, 2048, 2048),
        (4096, 1024, 4096),
    ):
        one, other = torch.rand(rows, inner), torch.rand(inner, columns)
        for _ in range(8):
            started_s = time.monotonic()
            torch.mm(one, other)
            rates.append(2 * rows * inner * columns / (time.monotonic() - started_s))
    answers.put(max(rates))


def _theirs(name: str, python: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What another library found; None where it is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        given, told = Path(folder) / "asked.json", Path(folder) / "found.json"
        given.write_bytes(msgspec.json.encode(asked))
        command = [
            python,
            str(Path(__file__).with_name("embeddings_elsewhere.py")),
            name,
            str(given),
            str(told),
        ]
        # Nothing of this environment belongs into another one.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode == NOT_THERE:
            return None
        if ended.returncode:
            raise SystemExit(f"{name} failed:\n{ended.stdout[-1000:]}{ended.stderr[-3000:]}")
        found: dict[str, Any] = msgspec.json.decode(told.read_bytes())
        return found


def _interpreters(named: list[str]) -> dict[str, str]:
    """The Python of each other side."""
    found = dict.fromkeys(("sentence-transformers", "openvino"), sys.executable)
    for folder in sorted((Path.home() / ".local/share/millrace").glob("vllm-*/bin/python")):
        found["vllm"] = str(folder)
    return found | dict(each.split("=", 1) for each in named)


def main() -> int:
    """Prints a line for each side, and JSON at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--python", action="append", default=[], metavar="SIDE=PATH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = find(options.checkpoint, "CHECKPOINT")
    pooling = read_pooling(folder)
    assert pooling is not None, "it pools"
    texts = texts_of(folder, options.texts)
    threads = options.threads or len(os.sched_getaffinity(0))
    asked = {
        "checkpoint": str(folder),
        "texts": texts,
        "threads": threads,
        "kind": pooling.kind,
        "normalized": pooling.normalized,
    }
    found: dict[str, dict[str, Any]] = {"millrace": _apart(_ours_in_process, folder, texts, threads)}
    interpreters = _interpreters(options.python)
    for name, python in interpreters.items():
        other = _theirs(name, python, asked)
        if other is not None:
            found[name] = other
            continue
        print(f"{name:24} is not installed")
        if name == "sentence-transformers" and (formula := _theirs("transformers", python, asked)):
            found["transformers"] = formula
    num_tokens = sum(map(len, texts))
    results = {name: _figures(each, num_tokens, found["millrace"]) for name, each in found.items()}
    for name, figures in results.items():
        print(f"{name:24} {figures['tokens_per_s']:10.0f} tokens/s {figures['seconds']:8.2f} s ", end="")
        print(f"{figures['peak_mib']:8.0f} MiB, cosine {figures['lowest_cosine']:.8f}")
    seconds = products_flop(folder, texts) / _apart(_best_rate, threads)
    print(f"{'products alone':24} {num_tokens / seconds:10.0f} tokens/s {seconds:8.2f} s ")
    results["products alone"] = {"seconds": seconds, "tokens_per_s": num_tokens / seconds}
    record = msgspec.json.encode({"texts": options.texts, "tokens": num_tokens, "sides": results})
    print(record.decode())
    if options.json is not None:
        options.json.write_bytes(record)
    return 0


def _figures(found: dict[str, Any], num_tokens: int, own: dict[str, Any]) -> dict[str, float]:
    one, other = (np.asarray(each["embeddings"], np.float64) for each in (own, found))
    cosines = (one * other).sum(1) / np.sqrt((one * one).sum(1) * (other * other).sum(1))
    return {
        "seconds": found["seconds"],
        "tokens_per_s": num_tokens / found["seconds"],
        "peak_mib": found["peak_mib"],
        "lowest_cosine": float(cosines.min()),
    }


if __name__ == "__main__":
    sys.exit(main())
