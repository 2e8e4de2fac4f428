"""Engines with drawn weights in this process, as the lease drives them."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import BLOCK_SIZE, Gpu
from benchmarks.gpu.random_model import drawn_weights, shape_of, write_checkpoint
from benchmarks.in_process import InProcessEngine, Mailbox
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core.loop import EngineLoop
from engine.runner.build import build_here
from engine.scheduler import Scheduler
from runtime.config import ModelConfig

# Several engines fit beside one another with caches of this size; those that compile are up to seven.
SMALL_CACHE_BYTES = 4 << 30
COMPILING_CACHE_BYTES = 2 << 30


def engine_config(
    gpu: Gpu, *, kind: str, max_num_seqs: int, max_model_len: int, is_small: bool, **changes: Any
) -> EngineConfig:
    """Of an engine that serves one load at a time. `kind` "fp8" has weights and KV in fp8, "int4" weights."""
    quantize = {"fp8": gpu.pick("fp8", "int8"), "int4": "int4"}.get(kind, "off")
    small = COMPILING_CACHE_BYTES if gpu.compiles else SMALL_CACHE_BYTES if is_small else 0
    settings: dict[str, Any] = {
        "device": gpu.device.type,
        "dtype": gpu.pick("bfloat16", "float32"),
        "native": gpu.pick("auto", "off"),
        "quantize": quantize,
        "max_model_len": max_model_len,
        "scheduler": SchedulerConfig(
            max_num_batched_tokens=gpu.pick(8192, 64),
            max_num_seqs=max_num_seqs,
            # Nobody else's time to first token is to be protected, and no plan depends on the clock.
            long_prefill_share=1.0,
            step_target_ms=0.0,
            refuse_early=False,
        ),
        "cache": CacheConfig(
            block_size=BLOCK_SIZE,
            kv_dtype="fp8" if kind == "fp8" else "auto",
            memory_fraction=0.92,
            kv_cache_bytes=gpu.pick(small, 4 << 20),
            prefix_caching=False,
        ),
    }
    return EngineConfig(**(settings | changes))


@contextlib.contextmanager
def opened(
    gpu: Gpu,
    *,
    kind: str,
    max_num_seqs: int,
    max_model_len: int,
    num_layers: int = 0,
    shape: Mapping[str, Any] | None = None,
    is_small: bool = False,
    **changes: Any,
) -> Iterator[InProcessEngine]:
    """An engine of the shape of `kind` (tiny in a rehearsal, of two layers while kernels are compiled), but
    for what `shape` says, with weights drawn on the device, the same ones each time. `changes` are settings.
    One that `is_small` leaves most of the memory to others.
    """
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    config = engine_config(gpu, kind=kind, is_small=is_small, **limits, **changes)
    _free(gpu)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, shape_of(gpu, kind, num_layers) | dict(shape or {}))
        began = time.monotonic()
        torch.manual_seed(0)
        with drawn_weights():
            runner, memory, facts = build_here(config, ModelConfig(path=str(folder)), _quiet)
        print(
            f"  {kind}: attention {facts.attention_backend}, {memory.num_blocks} blocks, "
            f"ready after {time.monotonic() - began:.0f} s",
            flush=True,
        )
        mailbox = Mailbox()
        scheduler = Scheduler(config.scheduler, config.cache, memory, model=str(folder), window=facts.window)
        loop = EngineLoop(scheduler, runner, mailbox, overlap=facts.device.startswith("cuda"))
        try:
            engine = InProcessEngine(loop, mailbox, memory, facts)
            # Whether decode steps are captured, or are eager, or on no GPU.
            engine.captures = getattr(runner.executor, "graphs", None) is not None
            yield engine
        finally:
            runner.close()
            # Whoever asked may name it until the next one is there, which wants its memory.
            vars(engine).clear()
            del runner, loop, engine
            _free(gpu)


def _free(gpu: Gpu) -> None:
    """Gives back what nobody holds: the engine asks the driver what is free."""
    gc.collect()
    if not gpu.rehearses:
        torch.cuda.empty_cache()


def _quiet(stage: str, fraction: float) -> None:
    """Progress is not reported."""
