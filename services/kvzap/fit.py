"""Fits a linear scorer in closed form: ridge regression of each layer, from sums over all texts.

Shape letters: N tokens, E hidden size, K kv heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine.model.kv_scorer import KvScorer
from engine.runner.forgotten.keys import Floats
from services.drafter.lessons import Lesson
from services.kvzap.targets import RepeatingModel

# One of so many texts is not learned from: it tells how well the others were learned.
HELD_OUT = 8
# What coefficients cost, as in the paper's own training (scikit-learn's Ridge).
_RIDGE = 1.0


class LayerSums:
    """Of one layer: sums over tokens, of which a regression is solved."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self._count = 0
        self._inputs = np.zeros(num_inputs)
        self._outputs = np.zeros(num_outputs)
        self._squares = np.zeros((num_inputs, num_inputs))
        self._products = np.zeros((num_inputs, num_outputs))

    def add(self, states: Floats, targets: NDArray[np.float64]) -> None:
        """States [N, E] and their targets [N, K]."""
        exact = states.astype(np.float64)
        self._count += len(exact)
        self._inputs += exact.sum(0)
        self._outputs += targets.sum(0)
        self._squares += exact.T @ exact
        self._products += exact.T @ targets

    def solved(self) -> tuple[Floats, Floats]:
        """Weight [K, E] and bias [K]; the bias costs nothing. Zeros where nothing was added."""
        count = max(1, self._count)
        inputs, outputs = self._inputs / count, self._outputs / count
        squares = self._squares - self._count * np.outer(inputs, inputs)
        products = self._products - self._count * np.outer(inputs, outputs)
        weight = np.linalg.solve(squares + _RIDGE * np.eye(len(squares)), products)
        return weight.T.astype(np.float32), (outputs - inputs @ weight).astype(np.float32)


class Fitness:
    """What part of the targets' variance a scorer explains, over layers and heads together."""

    def __init__(self, scorer: KvScorer) -> None:
        self._scorer = scorer
        self._missed = self._total = 0.0

    def add(self, layer: int, states: Floats, targets: NDArray[np.float64]) -> None:
        """See Learn."""
        self._missed += float(((self._scorer.score(layer, states).T - targets) ** 2).sum())
        self._total += float(((targets - targets.mean(0)) ** 2).sum())

    @property
    def explained(self) -> float:
        """At most 1."""
        return 1 - self._missed / max(self._total, 1e-30)


def fit(
    model: RepeatingModel, lessons: Sequence[Lesson], tell: Callable[[int], None]
) -> tuple[KvScorer, float]:
    """A scorer, and how well it foresees texts that it has not learned from, one of HELD_OUT. `tell` hears
    how many were read.
    """
    config = model.config
    sums = [LayerSums(config.input_dim, config.output_dim) for _ in range(config.n_modules)]
    held = lessons[HELD_OUT - 1 :: HELD_OUT]
    learned = [each for number, each in enumerate(lessons, 1) if number % HELD_OUT]
    for number, lesson in enumerate(learned, 1):
        model.teach(lesson, lambda layer, states, targets: sums[layer].add(states, targets))
        tell(number)
    scorer = KvScorer(layers=[[each.solved()] for each in sums])
    fitness = Fitness(scorer)
    for number, lesson in enumerate(held, len(learned) + 1):
        model.teach(lesson, fitness.add)
        tell(number)
    return scorer, fitness.explained


def write(scorer: KvScorer, model: RepeatingModel, out: Path) -> None:
    """The folder of a scorer, as kvpress' KVzapModel is saved."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, ((weight, bias),) in enumerate(scorer.layers):
        tensors[f"layers.{layer}.weight"] = np.ascontiguousarray(weight)
        tensors[f"layers.{layer}.bias"] = bias
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    told = msgspec.structs.asdict(model.config) | {"architectures": ["KVzapModel"], "dtype": "float32"}
    (out / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(told)) + b"\n")
