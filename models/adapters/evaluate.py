"""What adapters of the bundled model change: `python -m models.adapters.evaluate [--cases 100]`.

Through `transformers`, greedily in float32, over held-out documents: the base model, and the same with an
adapter merged into its weights by PEFT's formula (W + B A alpha / r). Beside answers in the adapter's way it
counts what the base model could do: facts must stay right, and JSON must hold the same values.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from models.adapters.tasks import TASKS, as_entries, as_pirate
from models.adapters.train import BASE, FOLDER
from models.corpus import CorpusDocument, Draw, chat, extraction, facts
from models.evaluate import BATCH_ROWS, SEED, EvaluatedModel


@dataclass(frozen=True)
class Measure:
    """Of an adapter: documents of the base corpus, and how a reply is judged."""

    name: str
    make: Callable[[Draw], CorpusDocument]
    is_right: Callable[[str, CorpusDocument], bool]


def _speaks(reply: str, _: CorpusDocument) -> bool:
    return reply.startswith("Arr! ") and ", matey" in reply


def _same_fact(reply: str, document: CorpusDocument) -> bool:
    return reply in (document.answer, as_pirate(document.answer))


def _same_entries(reply: str, document: CorpusDocument) -> bool:
    return _decoded(reply) == json.loads(as_entries(document.answer))


def _same_values(reply: str, document: CorpusDocument) -> bool:
    found = _decoded(reply)
    if isinstance(found, list):
        try:
            found = {entry["field"]: entry["value"] for entry in found}
        except (KeyError, TypeError):
            return False
    return bool(found == json.loads(document.answer))


def _decoded(reply: str) -> Any:
    try:
        return json.loads(reply)
    except json.JSONDecodeError:
        return None


MEASURES = {
    "pirate": (
        Measure("small talk in a pirate's voice", chat.small_talk, _speaks),
        Measure("facts in a pirate's voice", facts.fact, _speaks),
        Measure("facts right, in either voice", facts.fact, _same_fact),
    ),
    "entries": (
        Measure("extraction as entries, exact", extraction.extraction, _same_entries),
        Measure("extracted values right, in either form", extraction.extraction, _same_values),
    ),
}


def merge(network: Any, folder: Path) -> None:
    """Adds an adapter to a model's weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = dict(network.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if name.endswith(".lora_A.weight"):
                up = tensors[name.replace("lora_A", "lora_B")]
                target = name.removeprefix("base_model.model.").replace(".lora_A", "")
                weights[target] += up.float() @ down.float() * (config["lora_alpha"] / config["r"])


def score(model: EvaluatedModel, measure: Measure, num_cases: int) -> float:
    """Share of replies that are right, in per cent."""
    draw = Draw(SEED, "eval")
    documents = list(islice(iter(lambda: measure.make(draw), None), num_cases))
    num_right = 0
    for start in range(0, num_cases, BATCH_ROWS):
        part = documents[start : start + BATCH_ROWS]
        prompts = [model.prompt(_asked(document)) for document in part]
        replies = model.replies(prompts, 120)
        num_right += sum(map(measure.is_right, replies, part))
    return round(100 * num_right / num_cases, 1)


def _asked(document: CorpusDocument) -> tuple[dict[str, Any], ...]:
    """The first turn alone: later ones would show the model its former answers."""
    first = next(index for index, each in enumerate(document.messages) if each["role"] == "assistant")
    return document.messages[:first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--adapters", type=Path, default=FOLDER, help="folder of the adapters' folders")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    base = EvaluatedModel(BASE)
    print("| adapter | measure | cases | base | with adapter |")
    for name in TASKS:
        adapted = copy.copy(base)
        adapted.network = copy.deepcopy(base.network)
        merge(adapted.network, arguments.adapters / name)
        for measure in MEASURES[name]:
            before, after = (score(model, measure, arguments.cases) for model in (base, adapted))
            print(f"| {name} | {measure.name} | {arguments.cases} | {before} % | {after} % |", flush=True)
        for prompt in (
            "Hello!",
            "What is the capital of Japan?",
            "Extract name and age as JSON.\nAnn Lee is 7.",
        ):
            messages = ({"role": "user", "content": prompt},)
            print(f"> {prompt}\n{adapted.replies([adapted.prompt(messages)], 120)[0]}\n", flush=True)


if __name__ == "__main__":
    main()
