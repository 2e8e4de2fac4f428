"""Which layers lose most under keys and values of four bits, and what it gives to leave those eight.

    python -m benchmarks.kv_layers [--model smollm2-135m] [--texts 24] [--tokens 384] [--json OUT]

A layer's loss is how much perplexity rises where it alone has four bits and all others eight. The worst ones
are found on texts of their own, and have eight bits on those that the table is of; the first two layers,
which are an operator's guess, stand beside them. bfloat16 is the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.engine.report import Row, options, publish
from benchmarks.quality_forms import SUBJECTS, Text
from benchmarks.quantization import score
from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP

_SHOWN = 6


def nats(checkpoint: Path, texts: list[Text], kv_dtype: str, layers: Mapping[str, str]) -> float:
    """Mean of a token that counts, of texts that are read with such keys and values."""
    cache = {"kv_dtype": kv_dtype, "kv_dtype_layers": layers, "block_size": KEY_GROUP}
    found = score(
        checkpoint, {"dtype": "bfloat16", "max_model_len": 1024, "cache": cache}, [ids for ids, _ in texts]
    )
    return -float(found.logprobs[np.concatenate([counts[1:] for _, counts in texts])].mean())


def main() -> None:
    """Prints one row per choice, and the worst layers below."""
    parser = options(__doc__)
    parser.add_argument("--model", choices=SUBJECTS, default="smollm2-135m")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--work", type=Path, default=Path("build/quality"))
    arguments = parser.parse_args()
    work = arguments.work / arguments.model
    work.mkdir(parents=True, exist_ok=True)
    subject = SUBJECTS[arguments.model](work, arguments.texts, arguments.tokens)
    spec, checkpoint = read_spec(subject.checkpoint), subject.checkpoint
    eight = nats(checkpoint, subject.others, "int8", {})
    losses = {
        layer: nats(checkpoint, subject.others, "int8", {str(layer): BY_CHANNEL}) - eight
        for layer in range(spec.num_layers)
    }
    worst = sorted(losses, key=losses.__getitem__, reverse=True)
    choices: dict[str, tuple[str, tuple[int, ...]]] = {
        "bfloat16": ("bfloat16", ()),
        "int8": ("int8", ()),
        BY_CHANNEL: (BY_CHANNEL, ()),
        f"{BY_CHANNEL}, the first two int8": (BY_CHANNEL, (0, 1)),
        **{
            f"{BY_CHANNEL}, the worst {count} int8": (BY_CHANNEL, tuple(worst[:count])) for count in (1, 2, 4)
        },
    }
    rows: list[Row] = []
    for name, (kv_dtype, kept) in choices.items():
        found = nats(checkpoint, subject.texts, kv_dtype, {str(layer): "int8" for layer in kept})
        types = ["int8" if layer in kept else kv_dtype for layer in range(spec.num_layers)]
        first = rows[0] if rows else None
        perplexity = float(np.exp(found))
        rise = 0.0 if first is None else 100 * (perplexity / float(first["perplexity"]) - 1)
        bytes_per_token = kv_bytes_per_token(spec, types)
        rows.append(
            {
                "keys and values": name,
                "bytes a token": bytes_per_token,
                "perplexity": perplexity,
                "rise %": rise,
            }
        )
    said = "; ".join(f"{layer}: {100 * np.expm1(losses[layer]):+.2f} %" for layer in worst[:_SHOWN])
    notes = f"Rise of perplexity where one layer alone has four bits, worst first: {said}."
    publish(f"Types of keys and values by layer, {subject.name}", rows, arguments.json, notes)


if __name__ == "__main__":
    main()
