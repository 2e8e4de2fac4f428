"""What stands for a GPU: attention that can be captured, and a recorder that holds captured work
to the rules of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
from kernels.attention.tiled import TiledAttention
from kernels.paged_cache.store import LayerCache

# What makes the host wait for the device: reading a number, or a shape that depends on values.
FORBIDDEN = (
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::allclose",
)


class HostReadError(AssertionError):
    """Captured work read from the device."""


class AddressChangedError(AssertionError):
    """A replay would use memory that the captured work did not."""


class GraphRules(TorchDispatchMode):
    """Forbids host reads, and notes the addresses of tensors that come from outside the captured work."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[tuple[str, int]] = []
        self._given: set[int] = set()
        self._made: set[int] = set()
        self._kept: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition(".")[0]
        if name in FORBIDDEN:
            raise HostReadError(f"{func.name()} inside captured work")
        for tensor in _tensors((args, kwargs or {})):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in self._made:
                self._given.add(storage)
                self.addresses.append((func.name(), tensor.data_ptr()))
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in self._given:
                self._made.add(storage)
                # Kept, so that no address is used twice within the work.
                self._kept.append(tensor)
        return out


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        # Weights in oneDNN's own layout have no address to speak of.
        return [value] if value.layout == torch.strided else []
    if isinstance(value, dict):
        return _tensors(tuple(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


class CheckedRecording:
    """Runs the captured work again, on the same addresses or not at all."""

    def __init__(self, work: Callable[[], None], addresses: list[tuple[str, int]]) -> None:
        self._work, self._addresses = work, addresses
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        with GraphRules() as rules:
            self._work()
        if rules.addresses != self._addresses:
            raise AddressChangedError("a replay touched other tensors than the capture did")


class CheckedRecorder:
    """A GraphRecorder for CPUs."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.recordings: list[CheckedRecording] = []

    def record(self, work: Callable[[], None]) -> CheckedRecording:
        work()
        with GraphRules() as rules:
            work()
        self.recordings.append(CheckedRecording(work, rules.addresses))
        return self.recordings[-1]


class CapturableAttention(TiledAttention):
    """Torch's attention, with decode steps that look at whole tables under a mask."""

    def __init__(self, *, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(num_heads=num_heads, num_kv_heads=num_kv_heads)
        self.group = num_heads // num_kv_heads

    def plan(self, batch: RaggedBatch, device: torch.device) -> Any:
        return super().plan(batch, device)

    def plan_decode(self, batch: DecodeBatch) -> DecodeBatch:
        return batch

    def begin(self, plan: DecodeBatch) -> None:
        """Nothing: `run` reads the buffers."""

    def captured_workspace_bytes(self, rows: int, max_context_len: int, head_dim: int) -> int:
        return 4 * rows * max_context_len * (head_dim + self.group)

    def run(
        self, plan: Any, q: Tensor, cache: LayerCache, options: AttentionOptions, sinks: Tensor | None = None
    ) -> Tensor:
        if not isinstance(plan, DecodeBatch):
            return super().run(plan, q, cache, options, sinks)
        places = torch.arange(plan.block_tables.shape[1] * plan.block_size)
        seen = places < plan.context_lens[:, None]
        if options.window is not None:
            seen = seen & (places >= plan.context_lens[:, None] - options.window)
        keys, values = cache.gather(plan.block_tables.long())
        seen = seen[:, None, :]
        keys = torch.where(seen[..., None], keys, 0.0).repeat_interleave(self.group, 1)
        values = torch.where(seen[..., None], values, 0.0).repeat_interleave(self.group, 1)
        scores = (q.float()[:, :, None] * keys).sum(-1) * options.scale
        if options.soft_cap is not None:
            scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[None, :, None].expand(len(scores), -1, 1)), dim=-1)
        shares = torch.softmax(scores, -1)[..., : values.shape[2]]
        return (shares[..., None] * values).sum(2).to(q.dtype)
