"""Quantization-aware fine-tuning: weights learn to stand on the levels that `--quantize int4` rounds them to.

    python -m models.recipes.quantization_aware MODEL OUT --data conversations.jsonl

In the forward pass every weight of the decoder's layers is rounded to sixteen levels a group, as the
engine does at load; the gradient goes to the weight behind it as if nothing had been rounded (a
straight-through estimator, arXiv 1308.3432). What is saved stands on the levels, so that serving OUT with
`--quantize int4` loses nothing more.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.recipes.fine_tune import Course, course_of, fine_tune, open_model, options, save_model

LEVELS = 15


class GroupRounding(nn.Module):
    """weight [N, K] on sixteen levels between the lowest and the highest of each group of inputs."""

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self._group_size = group_size

    def forward(self, weight: Tensor) -> Tensor:
        grouped = weight.detach().reshape(len(weight), -1, self._group_size)  # [N, G, size]
        lowest = grouped.amin(-1, keepdim=True)
        step = ((grouped.amax(-1, keepdim=True) - lowest) / LEVELS).clamp(min=1e-10)
        rounded = ((grouped - lowest) / step).round() * step + lowest
        straight: Tensor = weight + (rounded.flatten(1) - weight.detach())
        return straight


def rounded_layers(model: nn.Module, group_size: int) -> list[nn.Linear]:
    """The linear layers that the engine quantizes: all but the head, whose inputs fall into whole groups."""
    return [
        each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and "lm_head" not in name and each.in_features % group_size == 0
    ]


def train(folder: Path, out: Path, course: Course, group_size: int) -> None:
    """Trains the model of a folder, and writes it to another."""
    model, tokenizer = open_model(folder)
    layers = rounded_layers(model, group_size)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", GroupRounding(group_size))
    fine_tune(model, tokenizer, course)
    for layer in layers:
        # Keeps what was rounded.
        parametrize.remove_parametrizations(layer, "weight")
    save_model(model, folder, out)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--group-size", type=int, default=64, help="as engine.quantization.group_size")
    given = parser.parse_args()
    train(given.model, given.out, course_of(given), given.group_size)


if __name__ == "__main__":
    main()
