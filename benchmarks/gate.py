"""The gate's error rates on real stacks: what is broken is found, identical deployments are not called worse.

The bundled model is served as it is and in copies that are broken on purpose: weights of 4 bits with one
coarse scale for each tensor, keys and values with a wrong scale, another base of positions, another template;
of its adapters one is taken for the other. What a server does wrong around a model is done to the request:
another temperature, a schema left out, the middle of a long text lost. Every case is asked once of each; a
release is a draw of at most 300 of a layer's cases, looked at after every round as the gate does. Perplexity
is left to identical deployments: the bundled model was trained to answer, finds plain text less probable than
chance, and more probable the flatter it is made.

    python -m benchmarks.gate [--cases 400] [--runs 100] [--identical-runs 300] [--json OUT]
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.engine.report import Row, options, publish
from services.cli.temporary import temporary_stack
from services.gate.cases import Case, GateVerdict, LayerName, Pair, ServerAnswer
from services.gate.client import Endpoint, GateClient
from services.gate.run import ROUND
from services.gate.scoring import Scorer
from services.gate.suite import (
    BehaviourLayer,
    IntrinsicLayer,
    LongContextLayer,
    StructureLayer,
    Suite,
    TaskLayer,
    TokensLayer,
    build_cases,
)
from services.gate.verdict import rule_of
from services.supervisor.config import BUNDLED_MODEL

MOST_ANSWERS = 300
# Of the needles, in tokens: where the bundled model recalls well.
WINDOW = 1024
_WRONG_BASE = 500_000.0
_WRONG_SCALE = 1.25
_WRONG_TEMPLATE = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"

Change = Callable[[Case], Case]
Differences = NDArray[np.float64]


def four_bits(name: str, weight: Tensor) -> Tensor:
    """Rounded to 15 steps with one scale for the whole tensor, which its largest weight decides."""
    if weight.ndim != 2 or "layers" not in name:
        return weight
    step = weight.abs().max() / 7
    rounded: Tensor = (weight / step).round().clamp(-8, 7) * step
    return rounded


def wrong_scale(name: str, weight: Tensor) -> Tensor:
    """Keys and values come out of the cache by a factor too large."""
    return weight * _WRONG_SCALE if name.endswith(("k_norm.weight", "v_proj.weight")) else weight


def _copy(folder: Path, name: str) -> Path:
    path = folder / name
    shutil.copytree(BUNDLED_MODEL, path, ignore=shutil.ignore_patterns("adapters", "README.md"))
    return path


def _with_weights(folder: Path, name: str, change: Callable[[str, Tensor], Tensor]) -> Path:
    path = _copy(folder, name)
    weights = {
        key: change(key, weight).contiguous() for key, weight in load_file(path / "model.safetensors").items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _with_key(folder: Path, name: str, file: str, **keys: Any) -> Path:
    path = _copy(folder, name)
    found = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**found, **keys}))
    return path


def broken_models(folder: Path) -> dict[str, Path]:
    """Checkpoints by what is wrong with them."""
    return {
        "four-bits": _with_weights(folder, "four-bits", four_bits),
        "scale": _with_weights(folder, "scale", wrong_scale),
        "base": _with_key(folder, "base", "config.json", rope_theta=_WRONG_BASE),
        "template": _with_key(folder, "template", "tokenizer_config.json", chat_template=_WRONG_TEMPLATE),
    }


def warmer(case: Case) -> Case:
    """Temperature 1.1 for 1.0."""
    return msgspec.structs.replace(case, body={**case.body, "temperature": 1.1})


def without_schema(case: Case) -> Case:
    """As a server that ignores it."""
    body = {key: value for key, value in case.body.items() if key != "response_format"}
    return msgspec.structs.replace(case, body=body)


def without_middle(case: Case) -> Case:
    """The text from 40 to 60 % of a message is lost."""
    lines = case.body["messages"][0]["content"].splitlines(keepends=True)
    kept = "".join([*lines[: len(lines) * 2 // 5], *lines[len(lines) * 3 // 5 :]])
    return msgspec.structs.replace(case, body={**case.body, "messages": [{"role": "user", "content": kept}]})


class Served:
    """A model of a running stack; `change` is what happens to requests on their way."""

    def __init__(self, endpoint: Endpoint, change: Change = lambda case: case) -> None:
        self.endpoint, self.change = endpoint, change

    async def answers(self, cases: Sequence[Case], concurrency: int) -> list[ServerAnswer]:
        """One for each case."""
        async with GateClient(self.endpoint, concurrency=concurrency) as client:
            await client.identify()
            return list(await asyncio.gather(*(client.answer(self.change(case)) for case in cases)))


def differences(
    cases: Sequence[Case],
    ours: Sequence[ServerAnswer],
    theirs: Sequence[ServerAnswer],
    control: Sequence[ServerAnswer],
) -> Differences:
    """As the gate scores them."""
    scorer = Scorer(seeds_hold=True)
    rows = zip(cases, ours, theirs, control, strict=True)
    pairs = (Pair(case=case, baseline=a, candidate=b, control=c) for case, a, b, c in rows)
    return np.array([scorer.score(pair).difference for pair in pairs])


def looked_at(layer: LayerName, suite: Suite, found: Differences) -> tuple[GateVerdict, int]:
    """The verdict, and after how many cases it came."""
    rule, verdict, end = rule_of(layer, suite), GateVerdict.NOT_ENOUGH, 0
    for end in range(ROUND, len(found) + 1, ROUND):
        verdict = rule.decide(found[:end])
        if verdict is not GateVerdict.NOT_ENOUGH:
            break
    return verdict, end


def power(layer: LayerName, suite: Suite, pool: Differences, runs: int) -> Row:
    """Of how many releases the verdict is "worse", and after how many cases."""
    random = np.random.default_rng(0)
    count = min(MOST_ANSWERS, len(pool))
    ends = [looked_at(layer, suite, random.choice(pool, size=count, replace=True)) for _ in range(runs)]
    found = [end for verdict, end in ends if verdict is GateVerdict.WORSE]
    return {
        "layer": layer,
        "called worse": len(found),
        "releases": runs,
        "median answers": float(np.median(found)) if found else 0.0,
        "mean difference": float(pool.mean()),
    }


def alarms(suite: Suite, pools: Mapping[LayerName, Differences], runs: int) -> Row:
    """Of how many identical releases any layer is called worse; "mean difference" is without signs.

    Which of two equal runs is the candidate's is drawn for every case: both are as good.
    """
    count = 0
    for seed in range(runs):
        random = np.random.default_rng(seed)
        called = False
        for layer, pool in pools.items():
            some = random.choice(pool, size=MOST_ANSWERS) * random.choice([1.0, -1.0], size=MOST_ANSWERS)
            called = called or looked_at(layer, suite, some)[0] is GateVerdict.WORSE
        count += called
    mean = float(np.mean([abs(pool).mean() for pool in pools.values()]))
    return {
        "layer": "all six",
        "called worse": count,
        "releases": runs,
        "median answers": 0.0,
        "mean difference": mean,
    }


def suite_of(num_cases: int) -> Suite:
    """All six layers, generated."""
    return Suite(
        tokens=TokensLayer(cases=num_cases, max_tokens=24),
        intrinsic=IntrinsicLayer(cases=num_cases),
        task=TaskLayer(cases=100, max_tokens=64),
        structure=StructureLayer(cases=100, max_tokens=64),
        long_context=LongContextLayer(
            window=WINDOW, lengths=(0.4, 0.8), repeats=30, kinds=("single", "distractors"), max_tokens=32
        ),
        behaviour=BehaviourLayer(cases=40),
    )


async def measure(
    suite: Suite, baseline: Served, broken: Mapping[str, tuple[Served, tuple[LayerName, ...]]], runs: int
) -> tuple[list[Row], dict[LayerName, Differences]]:
    """A row for each way of being broken and layer that should find it; and differences of equal runs."""
    cases = build_cases(suite, Path(), WINDOW, 3.0)
    by_layer = {layer: [case for case in cases if case.layer == layer] for layer in suite.layers()}
    ours = {layer: await baseline.answers(own, 8) for layer, own in by_layer.items()}
    # Only tokens are compared with what the baseline does the second time.
    again = {**ours, "tokens": await baseline.answers(by_layer["tokens"], 8)}
    rows: list[Row] = []
    for name, (served, layers) in broken.items():
        for layer in layers:
            theirs = await served.answers(by_layer[layer], 8)
            pool = differences(by_layer[layer], ours[layer], theirs, again[layer])
            rows.append({"broken": name, **power(layer, suite, pool, runs)})
            print(rows[-1], flush=True)
    # As a deployment under another load, whose batches differ.
    third = {layer: await baseline.answers(own, 3) for layer, own in by_layer.items()}
    pools = {
        layer: differences(own, ours[layer], third[layer], again[layer]) for layer, own in by_layer.items()
    }
    return rows, pools


def main() -> None:
    """Prints a row for each way of being broken, then that of identical deployments."""
    parser = options(__doc__)
    parser.add_argument("--cases", type=int, default=400, help="of the layers that compare tokens")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--identical-runs", type=int, default=300)
    chosen = parser.parse_args()
    suite = suite_of(chosen.cases)
    tokens: tuple[LayerName, ...] = ("tokens",)
    with tempfile.TemporaryDirectory() as temporary:
        models = broken_models(Path(temporary))
        named = [f"--model={name}={path}" for name, path in models.items()]
        with temporary_stack(f"sound={BUNDLED_MODEL}", *named) as target:

            def served(model: str, change: Change = lambda case: case) -> Served:
                return Served(Endpoint(url=target.url, model=model, api_key=target.api_key), change)

            broken = {
                **{name: (served(name), tokens) for name in ("four-bits", "scale", "base")},
                "template": (served("template"), tokens),
                "temperature": (served("sound", warmer), tokens),
                "schemas": (served("sound", without_schema), ("structure",)),
                "needles": (served("sound", without_middle), ("long_context",)),
            }
            rows, pools = asyncio.run(measure(suite, served("sound"), broken, chosen.runs))
            adapter = {"adapter": (served("sound:pirate"), tokens)}
            only = Suite(tokens=suite.tokens)
            rows += asyncio.run(measure(only, served("sound:entries"), adapter, chosen.runs))[0]
        rows.append({"broken": "nothing", **alarms(suite, pools, chosen.identical_runs)})
    notes = (
        f"a release: {MOST_ANSWERS} answers of a layer at most, drawn with replacement of "
        f"{chosen.cases} (tokens, perplexity) or what the layer has; false alarms: 1 in 100 releases of "
        "six layers are allowed"
    )
    publish("What the gate finds", rows, chosen.json, notes)


if __name__ == "__main__":
    main()
