"""transformers' own `generate` with a static batch, in process: what no server at all reaches.

`python -m benchmarks.peers.transformers_static CHECKPOINT [--concurrency 1 8 32]`
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

INPUT_TOKENS, OUTPUT_TOKENS = 256, 128


def tokens_per_s(checkpoint: Path, concurrency: int, *, seed: int = 0) -> float:
    """Output tokens per second of one batch."""
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(checkpoint, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    prompts = torch.randint(300, 30_000, (concurrency, INPUT_TOKENS))
    options = {"do_sample": False, "attention_mask": torch.ones_like(prompts), "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(prompts[:1], max_new_tokens=2, **options)
        began = time.perf_counter()
        model.generate(prompts, min_new_tokens=OUTPUT_TOKENS, max_new_tokens=OUTPUT_TOKENS, **options)
    return concurrency * OUTPUT_TOKENS / (time.perf_counter() - began)


def main() -> None:
    """Prints one line for each concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    for concurrency in arguments.concurrency:
        print(
            f"transformers, batch {concurrency:3}: "
            f"{tokens_per_s(arguments.checkpoint, concurrency):8.1f} tokens/s"
        )


if __name__ == "__main__":
    main()
