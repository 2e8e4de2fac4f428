"""What answers that forget (`kv`) say they lost of their attention, beside what they did.

    python -m benchmarks.forgotten [--models bundled smollm2-135m] [--keeps 0.5 0.25 0.1] [--tokens 1024]
        [--answers 4] [--output 64] [--json OUT]
    python -m benchmarks.forgotten --stream 100000

A prompt is a text that the model wrote itself, at temperature 1, of so many tokens, to which it answers
greedily. What is lost is measured over the same answers: as it is served, from keys in eight bits
(`engine/runner/forgotten`); and from the keys as they were, in float64, which nobody could keep. Beside
them is what the boxes of blocks alone would say, a third of the memory. A share is that of all attention of
an answer, on average over its tokens, layers and heads.

`--stream` is about memory instead: the bundled model, which has 4,096 positions, goes on for so many tokens
with a window of 512, and what the process and the answer hold is printed on the way; and, the only times
here, the longest gap between two tokens where it goes on beyond the positions, and the longest of the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from resource import getpagesize
from unittest import mock

import numpy as np

from benchmarks.engine.report import Row, options, publish
from checkpoint.files import find
from contract.retention import Retention
from engine.config import CacheConfig, EngineConfig
from engine.runner.build import build_here
from engine.runner.forgotten.keys import Floats, LayerKeys
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from runtime.config import ModelConfig
from services.supervisor.config import BUNDLED_MODEL

Texts = list[tuple[int, ...]]
_START_TOKENS = 8
# Of the answer that goes on and on.
_PROMPT_TOKENS, _WINDOW_TOKENS = 512, 512


class KeysAsTheyWere(LayerKeys):
    """The oracle."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[Floats] = []

    def add(self, keys: Floats) -> None:
        """See LayerKeys."""
        self._keys.append(keys.reshape(keys.shape[0], -1, keys.shape[3]))

    def log_mass(self, q: Floats, log_seen: Floats, soft_cap: float | None) -> np.ndarray:
        """The logarithm itself."""
        scores = q.astype(np.float64) @ np.concatenate(self._keys, 1).swapaxes(1, 2).astype(np.float64)
        assert soft_cap is None, "neither model has one"
        most = scores.max(-1)
        return np.log(np.exp(scores - most[..., None]).sum(-1)) + most


def answered(
    folder: Path, prompts: Texts, num_tokens: int, retention: Retention | None, temperature: float
) -> tuple[Texts, list[float]]:
    """Each prompt's answer, and what it says it lost, in tokens."""
    config = EngineConfig(num_threads=2, cache=CacheConfig(kv_cache_bytes=1 << 29, forgotten_bytes=1 << 30))
    runner, memory, _ = build_here(config, ModelConfig(path=str(folder)), lambda phase, part: None)
    scheduler = Scheduler(config.scheduler, config.cache, memory, model="m")
    sampling = partial(SamplingParams, max_tokens=num_tokens, ignore_eos=True, temperature=temperature)
    tokens: Texts = [() for _ in prompts]
    lost = [0.0 for _ in prompts]
    with closing(runner):
        for number, prompt in enumerate(prompts):
            request = Request(
                request_id=number,
                external_id="",
                prompt_token_ids=prompt,
                sampling=sampling(seed=number),
                retention=retention,
            )
            scheduler.submit(request, 0.0)
        while scheduler.has_work:
            scheduler.update(runner.launch(scheduler.schedule(1.0)).wait(), 1.0)
            for event in scheduler.drain_events():
                assert event.failure is None, event.failure
                tokens[event.request_id] += event.token_ids
                if event.statistics is not None:
                    lost[event.request_id] = event.statistics.lost_tokens
    return tokens, lost


def compared(name: str, keep: float, prompts: Texts, num_tokens: int) -> Row:
    """One row: what answers with `keep` say they lost, and did."""
    retention = Retention(policy="window+sinks", keep=keep, max_lost=1.0)
    served, said = answered(_folder(name), prompts, num_tokens, retention, 0.0)
    with mock.patch("engine.runner.forgotten.meter.LayerKeys", KeysAsTheyWere):
        again, true = answered(_folder(name), prompts, num_tokens, retention, 0.0)
    with mock.patch.multiple("engine.runner.forgotten.keys", MOST_WHOLE_BLOCKS=1, MOST_BOXES=1 << 20):
        once_more, by_boxes = answered(_folder(name), prompts, num_tokens, retention, 0.0)
    assert served == again == once_more, "measuring changes no answer"
    ratios = [ours / theirs for ours, theirs in zip(said, true, strict=True)]
    return {
        "model": name,
        "keep": keep,
        "share reported": float(np.mean(said)) / num_tokens,
        "true share": float(np.mean(true)) / num_tokens,
        "by boxes alone": float(np.mean(by_boxes)) / num_tokens,
        "least reported / true": min(ratios),
        "most": max(ratios),
    }


def streamed(num_tokens: int) -> list[Row]:
    """What an answer of so many tokens holds at each tenth of it."""
    rows: list[Row] = []
    config = EngineConfig(num_threads=2, cache=CacheConfig(kv_cache_bytes=1 << 30))
    runner, memory, _ = build_here(config, ModelConfig(path=str(BUNDLED_MODEL)), lambda phase, part: None)
    scheduler = Scheduler(config.scheduler, config.cache, memory, model="m")
    request = Request(
        request_id=0,
        external_id="",
        prompt_token_ids=tuple(range(300, 300 + _PROMPT_TOKENS)),
        sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.7, seed=0),
        retention=Retention(policy="window+sinks", window_tokens=_WINDOW_TOKENS),
    )
    with closing(runner):
        num_blocks, num_drawn = scheduler.load(0.0).num_free_blocks, 0
        scheduler.submit(request, 0.0)
        gaps = _Gaps()
        while scheduler.has_work:
            scheduler.update(runner.launch(scheduler.schedule(1.0)).wait(), 1.0)
            count = sum(len(event.token_ids) for event in scheduler.drain_events())
            load = scheduler.load(1.0)
            gaps.see(count, load.counters.num_renewals)
            num_drawn += count
            if num_drawn > len(rows) * num_tokens // 10:
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
                rows.append(
                    {
                        "tokens": num_drawn,
                        "blocks held": num_blocks - load.num_free_blocks,
                        "resident MiB": resident // 2**20,
                        "renewals": load.counters.num_renewals,
                        **gaps.told(),
                    }
                )
    return rows


class _Gaps:
    """Longest times between tokens since they were told last."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._num_renewals = self._seen = 0
        self._longest_s = [0.0, 0.0]

    def see(self, num_tokens: int, num_renewals: int) -> None:
        """A step is through that gave so many tokens; so often the answer went on beyond the positions."""
        if not num_tokens:
            return
        now = time.perf_counter()
        if self._last_s is not None:
            # The step that brings an answer to the end of the positions renews it; the next token is late.
            renewed = self._num_renewals > self._seen
            self._longest_s[renewed] = max(self._longest_s[renewed], now - self._last_s)
            self._seen = self._num_renewals
        self._last_s, self._num_renewals = now, num_renewals

    def told(self) -> dict[str, float]:
        """In milliseconds."""
        plain, renewed = (round(1e3 * longest_s, 1) for longest_s in self._longest_s)
        self._longest_s = [0.0, 0.0]
        return {"longest gap, ms": plain, "at a renewal, ms": renewed}


def _folder(name: str) -> Path:
    return BUNDLED_MODEL if name == "bundled" else find(name)


def written(name: str, num_texts: int, num_tokens: int) -> Texts:
    """Texts that the model wrote, each behind other random tokens."""
    random = np.random.default_rng(0)
    starts: Sequence[tuple[int, ...]] = [
        tuple(random.integers(300, 2000, _START_TOKENS).tolist()) for _ in range(num_texts)
    ]
    return answered(_folder(name), list(starts), num_tokens, None, 1.0)[0]


def main() -> None:
    """Prints one row for each model and keep."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", default=("bundled", "smollm2-135m"))
    parser.add_argument("--keeps", type=float, nargs="+", default=(0.5, 0.25, 0.1))
    for name, value in (("tokens", 1024), ("answers", 4), ("output", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--stream", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.stream:
        notes = f"A window of {_WINDOW_TOKENS} tokens behind a prompt of {_PROMPT_TOKENS}."
        publish("What an endless answer holds", streamed(arguments.stream), arguments.json, notes)
        return
    rows = []
    for name in arguments.models:
        prompts = written(name, arguments.answers, arguments.tokens)
        rows += [compared(name, keep, prompts, arguments.output) for keep in arguments.keeps]
    notes = f"{arguments.answers} answers of {arguments.output} tokens to {arguments.tokens} tokens each."
    publish("What answers that forget lost of their attention", rows, arguments.json, notes)


if __name__ == "__main__":
    main()
