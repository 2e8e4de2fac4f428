"""Greedy decoding in bfloat16: how many of 32 requests get the same tokens alone and among the 31 others.

The baseline is `transformers` on the same checkpoint, in the same type, alone and in one padded batch.

    python -m benchmarks.engine.invariance [--json OUT]
"""

from __future__ import annotations

import random
import time

import torch
import transformers

from benchmarks.engine.report import Row, arguments, publish
from benchmarks.engine.speculation import _MODEL
from engine.config import EngineConfig
from engine.runner.build import build_here
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from services.config import ModelConfig

_NUM_REQUESTS, _NUM_TOKENS = 32, 64


def prompts() -> list[list[int]]:
    """Random prompts of many lengths."""
    rng = random.Random(6)
    return [[rng.randrange(300, 1000) for _ in range(3 + index * 29 % 150)] for index in range(_NUM_REQUESTS)]


class _Engine:
    def __init__(self) -> None:
        self._config = EngineConfig(dtype="bfloat16", num_threads=1)
        self._runner, self._memory, _ = build_here(
            self._config, ModelConfig(path=str(_MODEL)), lambda stage, part: None
        )

    def generate(self, batch: list[list[int]]) -> list[list[int]]:
        """The tokens of all prompts, computed together."""
        scheduler = Scheduler(self._config.scheduler, self._config.cache, self._memory, model="m")
        sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
        for index, prompt in enumerate(batch):
            request = Request(
                request_id=index, external_id="", prompt_token_ids=tuple(prompt), sampling=sampling
            )
            scheduler.submit(request, time.monotonic())
        outputs: list[list[int]] = [[] for _ in batch]
        while scheduler.has_work:
            plan = scheduler.schedule(time.monotonic())
            scheduler.update(self._runner.launch(plan).wait(), time.monotonic())
            for event in scheduler.take_events():
                outputs[event.request_id] += event.token_ids
        return outputs


class _Transformers:
    def __init__(self) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(_MODEL, dtype=torch.bfloat16)

    def generate(self, batch: list[list[int]]) -> list[list[int]]:
        """The tokens of all prompts, padded on the left."""
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=_NUM_TOKENS,
                max_new_tokens=_NUM_TOKENS,
                pad_token_id=0,
            )
        return found[:, longest:].tolist()


def main() -> None:
    """Both sides."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    batch = prompts()
    rows: list[Row] = []
    for name, side in (("baseline: transformers", _Transformers()), ("ours", _Engine())):
        together = side.generate(batch)
        alone = [side.generate([prompt])[0] for prompt in batch]
        same = sum(one == other for one, other in zip(alone, together, strict=True))
        rows.append({"configuration": name, "requests": len(batch), "same tokens alone and together": same})
    notes = f"{_NUM_TOKENS} greedy tokens each, bfloat16, {_MODEL.name}."
    publish("Greedy decoding alone and among 31 others", rows, options.json, notes)


if __name__ == "__main__":
    main()
