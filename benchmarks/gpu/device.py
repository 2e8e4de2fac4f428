"""The device under measurement: its clock, its roofs, and a rehearsal of both on a CPU.

In a rehearsal the same code runs over tiny shapes, kernels under Triton's interpreter; its figures mean
nothing and are marked so. While kernels are compiled ahead of a lease, work runs once and is not timed.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], object]
# Tokens of a block of the cache, as deployments on GPUs have it: steps of prompts are copied whole.
BLOCK_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median seconds of one piece of work."""

    seconds: float
    # Half the distance between the quartiles over the median.
    spread: float
    # "graph" (replayed, no launches in it) or "stream".
    how: str

    def fields(self) -> dict[str, float | str]:
        """For a report."""
        return {"us": self.seconds * 1e6, "spread": round(self.spread, 4), "timed by": self.how}


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """What the machine does at best, as measured."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    bf16_flops_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that memory-bound work is held against."""
        return self.copy_bytes_per_s

    def fields(self) -> dict[str, float]:
        """For a report."""
        return {
            "copy GB/s": self.copy_bytes_per_s / 1e9,
            "read GB/s": self.read_bytes_per_s / 1e9,
            "bf16 TFLOP/s": self.bf16_flops_per_s / 1e12,
        }


class Gpu:
    """One CUDA device, or the rehearsal of one. `compiles` says that nothing is measured, only compiled."""

    def __init__(self, *, rehearses: bool, compiles: bool = False, limit_s: float = float("inf")) -> None:
        self.rehearses, self.compiles = rehearses, compiles
        self._ends_s = time.monotonic() + limit_s
        if not rehearses and not torch.cuda.is_available():
            raise SystemExit("no CUDA device; --rehearse runs the same code over tiny shapes")
        self.device = torch.device("cpu" if rehearses else "cuda", None if rehearses else 0)
        # The type of activations.
        self.dtype = torch.bfloat16
        self.budget_s = 0.0 if rehearses else 0.3
        if not rehearses:
            torch.cuda.set_device(0)

    @property
    def left_s(self) -> float:
        """Time until the phase must have ended."""
        return self._ends_s - time.monotonic()

    def pick(self, real: Any, rehearsed: Any) -> Any:
        """A size: the real one, or that of a rehearsal."""
        return rehearsed if self.rehearses else real

    def facts(self) -> dict[str, Any]:
        """The machine and the versions."""
        try:
            import triton

            triton_version = triton.__version__
        except ImportError:
            triton_version = "none"
        facts: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton_version,
            "num_cpus": os.cpu_count(),
        }
        if not self.rehearses:
            properties = torch.cuda.get_device_properties(0)
            facts |= {
                "device": properties.name,
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
                "cuda": torch.version.cuda,
            }
        return facts

    def synchronize(self) -> None:
        """Waits for everything that was launched."""
        if not self.rehearses:
            torch.cuda.synchronize()

    def time(self, works: Work | Sequence[Work], *, graph: bool = True) -> Timing:
        """Time of one piece of work. Several (over different memory) run in turn, so that no cache holds what
        the next one reads; the result is of one of them. With `graph` they are captured and replayed, so
        that launches are not counted; what cannot be captured is timed as it is launched.
        """
        turns = [works] if callable(works) else list(works)
        if self.rehearses or self.compiles:
            began = time.perf_counter()
            for work in turns[:1] if self.compiles else turns:
                work()
            self.synchronize()
            return Timing(seconds=(time.perf_counter() - began) / len(turns), spread=0.0, how="rehearsal")
        for _ in range(2):
            for work in turns:
                work()
        torch.cuda.synchronize()
        once, how = self._captured(turns) if graph else None, "graph"
        if once is None:
            once, how = lambda: [work() for work in turns], "stream"
        samples = self._samples(once)
        quartiles = statistics.quantiles(samples, n=4)
        middle = quartiles[1]
        return Timing(seconds=middle / len(turns), spread=(quartiles[2] - quartiles[0]) / 2 / middle, how=how)

    def _captured(self, turns: list[Work]) -> Work | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for work in turns:
                    work()
        except RuntimeError as error:
            print(f"    not captured: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
            return None
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def _samples(self, once: Work) -> list[float]:
        first = self._sample(once)
        count = max(5, min(200, int(self.budget_s / max(first, 1e-6))))
        return [self._sample(once) for _ in range(count)]

    @staticmethod
    def _sample(once: Work) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        once()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def roofs(self) -> Roofs:
        """Measured anew by whoever asks: a second or so."""
        if self.compiles:
            return Roofs(copy_bytes_per_s=1.0, read_bytes_per_s=1.0, bf16_flops_per_s=1.0)
        size = self.pick(1 << 30, 1 << 12)
        source = torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_()
        target = torch.empty_like(source)
        copy = self.time(lambda: target.copy_(source), graph=False)
        words = source.view(torch.int32)
        read = self.time(words.amax, graph=False)
        edge = self.pick(8192, 64)
        left, right = (
            torch.empty(edge, edge, dtype=torch.bfloat16, device=self.device).normal_() for _ in range(2)
        )
        product = self.time(lambda: left @ right, graph=False)
        return Roofs(
            copy_bytes_per_s=2 * source.nbytes / copy.seconds,
            read_bytes_per_s=source.nbytes / read.seconds,
            bf16_flops_per_s=2 * edge**3 / product.seconds,
        )
