"""Pruning: weights that matter least become zero, and the others learn to do without them.

    python -m models.recipes.pruning MODEL OUT --data conversations.jsonl --pattern 2:4
    python -m models.recipes.pruning MODEL OUT --data conversations.jsonl --pattern 50% --time

Of each four neighbouring weights the two smallest go (2:4, which sparse tensor cores of GPUs multiply at
twice the rate), or of a whole layer a share (unstructured). It is not faster here: nothing in Millrace
skips a zero, and `--time` shows beside each other what torch's dense and sparse products of one layer
take on this machine. What is won is what a GPU's library makes of 2:4, and a file that compresses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from models.recipes.fine_tune import Course, course_of, fine_tune, open_model, options, save_model
from models.recipes.quantization_aware import rounded_layers

_TIMES = 21


def half_of_four(weight: Tensor) -> Tensor:
    """A mask [N, K] with ones at the two largest of each four neighbours in a row."""
    grouped = weight.detach().reshape(len(weight), -1, 4)
    kept = grouped.abs().topk(2, dim=-1).indices
    return torch.zeros_like(grouped).scatter(-1, kept, 1.0).flatten(1)


def prune_layers(layers: list[nn.Linear], pattern: str) -> None:
    """Hangs a mask of the pattern before each layer's weight. Raises ValueError for one that is none."""
    share = pattern.removesuffix("%")
    if pattern != "2:4" and not (pattern.endswith("%") and share.isdigit() and 0 < int(share) < 100):
        raise ValueError(f"--pattern: {pattern!r} is neither 2:4 nor a share as 50%")
    for layer in layers:
        if pattern == "2:4":
            prune.custom_from_mask(layer, "weight", half_of_four(layer.weight))  # type: ignore[no-untyped-call]
        else:
            prune.l1_unstructured(layer, "weight", int(share) / 100)  # type: ignore[no-untyped-call]


def train(folder: Path, out: Path, course: Course, pattern: str) -> list[nn.Linear]:
    """Prunes the model of a folder, trains what is left, and writes it to another. Returns its layers."""
    model, tokenizer = open_model(folder)
    layers = rounded_layers(model, 4)
    prune_layers(layers, pattern)
    fine_tune(model, tokenizer, course)
    for layer in layers:
        prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
    save_model(model, folder, out)
    return layers


def show_times(layer: nn.Linear) -> None:
    """Dense and sparse products of a layer, in microseconds."""
    dense = layer.weight.detach().float()
    sparse = dense.to_sparse_csr()
    for rows in (1, 8, 64):
        inputs = torch.randn(rows, layer.in_features)
        taken = {
            "dense": _time(partial(torch.matmul, inputs, dense.T)),
            "sparse": _time(partial(torch.matmul, sparse, inputs.T)),
        }
        ratio = taken["sparse"] / taken["dense"]
        told = ", ".join(f"{name} {micros:.1f}" for name, micros in taken.items())
        print(f"{tuple(dense.shape)}, {rows} rows, microseconds: {told} ({ratio:.2f} of dense)")


def _time(product: Callable[[], Tensor]) -> float:
    taken = []
    for _ in range(_TIMES):
        began_s = time.perf_counter()
        product()
        taken.append(1e6 * (time.perf_counter() - began_s))
    return median(taken)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pattern", default="2:4", help="2:4, or a share as 50%%")
    parser.add_argument("--time", action="store_true", help="show what products of the largest layer take")
    given = parser.parse_args()
    layers = train(given.model, given.out, course_of(given), given.pattern)
    if given.time:
        show_times(max(layers, key=lambda layer: layer.weight.numel()))


if __name__ == "__main__":
    main()
