"""What the host does for a decode step of a GPU, without the GPU: planning, inputs, options, results.

The real core loop, scheduler and runner of GPUs, overlapped, over a model that computes nothing: graphs
replay no work, and the draw gives one token to every row. Left out is what only a device costs: launching
the graph and a dozen kernels, and copies from pinned memory (tens of microseconds each at most). The
baseline in the same run is the same loop over the simulated runner, which is loop and scheduler alone.

    python -m benchmarks.engine.host_time [--json OUT]
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.engine.overlap import _Mailbox
from benchmarks.engine.report import Row, arguments, publish
from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SimulatedConfig, SpeculationConfig
from engine.core.loop import EngineLoop
from engine.runner import simulated
from engine.runner.base import Runner
from engine.runner.cuda.build import make_device_table
from engine.runner.cuda.decode_graphs import DecodeGraphs, ladder
from engine.runner.executors.device import DeviceExecutor
from engine.runner.runner import ModelRunner
from engine.runner.speculation.proposer import Proposer
from engine.scheduler import Scheduler
from engine.types import MemoryPlan, Request, SamplingParams
from kernels.sampling.on_device import DeviceDrawn, row_options
from kernels.sampling.rows import SamplingRows
from runtime.config import ModelConfig

_BATCHES = (1, 32, 128, 256)
_NUM_TOKENS = 160
_PROMPT = 60
_VOCAB = 32_000
_BLOCK = 16
_MAX_LEN = 2048
# A step of Llama-3.1-8B in bfloat16 at batch 128 with contexts of 1,024 tokens reads 33 GB: 7 ms at 4.8 TB/s.
_STEP_US = 7000.0


class _NullExecutor(DeviceExecutor):
    """Everything but the arithmetic."""

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def _sampled(self, logits: torch.Tensor, rows: SamplingRows) -> DeviceDrawn:
        # What the draw would be told is put together and sent all the same.
        row_options(self.table.sampling, rows, self.model.device)
        yes = torch.ones(rows.slots.size, dtype=torch.bool)
        return DeviceDrawn(
            tokens=torch.full_like(yes, 7, dtype=torch.int64), finite=yes, allowed=yes, processed=logits
        )


class _NullRecorder:
    def record(self, work: Callable[[], None]) -> Any:
        """Nothing is captured, and nothing replayed."""
        return SimpleNamespace(replay=lambda: None)


def _null_runner(batch: int) -> tuple[Runner, MemoryPlan]:
    """The runner of GPUs over a null model on the CPU."""
    num_blocks = batch * (_PROMPT + _NUM_TOKENS + 2 * _BLOCK) // _BLOCK + 64
    memory = MemoryPlan(
        total_bytes=0,
        weights_bytes=0,
        workspace_bytes=0,
        headroom_bytes=0,
        kv_cache_bytes=0,
        kv_bytes_per_token=1,
        block_size=_BLOCK,
        num_blocks=num_blocks,
        max_model_len=_MAX_LEN,
    )
    device = torch.device("cpu")
    hidden = 64
    model = SimpleNamespace(
        spec=SimpleNamespace(vocab_size=_VOCAB, hidden_size=hidden),
        max_model_len=_MAX_LEN,
        device=device,
        row_multiple=1,
        kernels=SimpleNamespace(names={"sampling": "torch"}),
        embedding=torch.zeros(1, hidden),
        forward=lambda batch, caches, attention: torch.zeros(batch.token_ids.shape[0], hidden),
        wake=lambda: None,
    )
    storage = SimpleNamespace(
        layers=[],
        block_size=_BLOCK,
        num_blocks=num_blocks,
        spare_slot=num_blocks * _BLOCK,
        apply=lambda plan: None,
        close=lambda: None,
    )
    grammar = SimpleNamespace(close=lambda: None, fill=lambda wanted: Future())

    table = make_device_table(cast(Any, model), cast(Any, storage), cast(Any, grammar), max_num_seqs=batch)
    table.sampling.native = False

    def graphs(executor: DeviceExecutor) -> DecodeGraphs:
        made = DecodeGraphs(
            cast(Any, model),
            cast(Any, SimpleNamespace(plan_decode=lambda batch: SimpleNamespace(first=lambda rows: None))),
            [],
            table,
            sizes=ladder(batch),
            block_size=_BLOCK,
        )
        made.capture(_NullRecorder())
        return made

    executor = _NullExecutor(cast(Any, model), cast(Any, None), cast(Any, storage), table, graphs=graphs)
    runner = ModelRunner(
        executor=executor,
        table=table,
        storage=cast(Any, storage),
        grammar=cast(Any, grammar),
        proposer=Proposer(SpeculationConfig()),
    )
    return runner, memory


class _Watch:
    """Seconds by part, of every step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)
        # Of all steps, those that are not counted included.
        self.total_s: dict[str, float] = defaultdict(float)
        self._now: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, name: str, part: str) -> None:
        """Counts the calls of a method."""
        inner = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            with self.during(part):
                return inner(*args, **options)

        setattr(owner, name, timed)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts what happens inside."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._now[part] += seconds
        self.total_s[part] += seconds

    def end_step(self) -> None:
        """Closes one step's account."""
        for part, seconds in self._now.items():
            self.parts[part].append(seconds)
        self.drop_step()

    def drop_step(self) -> None:
        """Forgets the step in progress."""
        self._now.clear()

    def median_us(self, part: str) -> float:
        """Median over the steps of full batches."""
        return statistics.median(self.parts[part][10:-10]) * 1e6


def measure(batch: int, name: str) -> Row:
    """Median microseconds of the parts of a step."""
    scheduling = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=max(16_384, batch))
    if name == "simulated runner":
        config = EngineConfig(simulated=True, scheduler=scheduling, simulation=SimulatedConfig())
        runner, memory, _ = simulated.build(config, ModelConfig(path="simulated"))
    else:
        runner, memory = _null_runner(batch)
    requests = [
        Request(
            request_id=index,
            external_id=str(index),
            prompt_token_ids=tuple(range(index, index + _PROMPT)),
            sampling=SamplingParams(seed=index, temperature=0.8, top_p=0.9, max_tokens=_NUM_TOKENS),
        )
        for index in range(batch)
    ]
    mailbox = _Mailbox(requests)
    scheduler = Scheduler(scheduling, CacheConfig(prefix_caching=False), memory, model="null")
    loop = EngineLoop(scheduler, runner, mailbox, overlap=True)
    watch = _Watch()
    watch.around(scheduler, "schedule", "plan")
    watch.around(scheduler, "update", "results")
    watch.around(runner, "launch", "launch")
    watch.around(mailbox, "send", "publish")
    if isinstance(runner, ModelRunner):
        watch.around(runner, "_results", "read")
    # As the core does before it serves.
    gc.collect()
    gc.freeze()
    while mailbox.num_ended < batch:
        with watch.during("step"):
            loop.step()
        watch.end_step()
    gc.unfreeze()
    runner.close()
    row: dict[str, str | float | int] = {"sequences": batch, "runner": name}
    for part in ("plan", "launch", "read", "results", "publish", "step"):
        row[f"{part} us"] = round(watch.median_us(part), 1) if watch.parts[part] else 0.0
    row["% of a 7 ms step"] = round(100 * watch.median_us("step") / _STEP_US, 1)
    return row


def main() -> None:
    """All batches, baseline first."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    rows = [measure(batch, name) for batch in _BATCHES for name in ("simulated runner", "runner of GPUs")]
    publish(
        "Host time of an overlapped decode step, in microseconds (medians)",
        rows,
        options.json,
        "publish includes encoding for the front; launching on a real device is left out",
    )


if __name__ == "__main__":
    main()
