"""Reads weights: layers ask for tensors by name and shape. What is missing and what nobody asked for is an
error; what is known and not used is logged.

Files are memory-mapped; each tensor is converted to the target type and device once and alone, so the peak is
the model plus one tensor. A tensor that needs no conversion is a part of the mapping, which stays as long as
one of them lives. Where weights are packed, pages that were read are let go, and what stays is copied, so
that the mapping goes; but a large table that is looked up stays in the file, and only its rows that were
asked for are resident.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.files import folder_of, is_gguf
from engine.model.checkpoint import LoadRequest, read_headers
from engine.model.gguf_file import GgufFile, open_gguf
from engine.model.layer_spec import PredictionSpec
from engine.model.mapped_pages import MappedPages
from engine.model.mtp import MTP
from engine.model.records import LinearCut
from engine.model.spec import CheckpointError, TensorHeader
from engine.quantization.at_load import int8_weight, quantize
from engine.quantization.four_bit_floats import MXFP4_GROUP, MXFP4_NAN, mxfp4_weight
from engine.quantization.gguf_blocks import block_readers
from engine.quantization.scheme import FLOAT_TYPES
from engine.quantization.stored import read_weight
from kernels.linear.formats import (
    DenseWeight,
    Fp8Weight,
    PartedWeight,
    WeightFormat,
    is_finite,
    parts_of,
    picked_rows,
    rows_of,
    scales_of,
    stack,
)
from kernels.paged_cache.memory import empty_on_huge_pages
from kernels.selection import Kernels

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
# Buffers that old checkpoints carry and that are computed here, and static ranges of a quantized KV cache,
# whose scales are computed here for each token and head.
IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    ".masked_bias",
    ".attn.bias",
    ".k_scale",
    ".v_scale",
    ".output_scale",
)
# A table of this size stays in its file where it is used as it is stored.
LARGE_TABLE_BYTES = 16 << 20


class WeightReader:
    """Hands out a checkpoint's tensors, each once. Use as a context manager; call `finish` when all are
    taken.

    Linear layers come as formats of `kernels/linear`: as the checkpoint holds them, or quantized by
    `engine.quantize`.
    """

    def __init__(
        self,
        request: LoadRequest,
        *,
        device: torch.device,
        progress: Progress,
        kernels: Kernels,
        is_packed: bool = False,
        keeps_float16: bool = False,
    ) -> None:
        """`is_packed`: weights of linear layers are copied by those who take them, and let go.
        `keeps_float16`: they take float16 as it is, so it is not rounded to bfloat16.
        """
        self.folder = folder = request.folder
        self._is_packed = is_packed
        self.scheme = request.spec.quantization
        # Ranges are found by reading on, as a decoder does.
        self._reads_on = not request.spec.bidirectional
        self.config = request.config
        # What the layers that are built from these weights compute with.
        self.kernels = kernels
        self.dtype = dtype = getattr(torch, request.dtype)
        # Calibration computes a layer with torch, in the serving type.
        self._keeps_float16 = keeps_float16 and dtype == torch.bfloat16 and not self.calibrates
        self.device = device
        self.progress = progress
        stored = read_headers(folder)
        self.headers = stored if is_gguf(folder) else request.spec.names.of(stored)
        if len(self.headers) < len(stored):
            kept = {header.stored_name or name for name, header in self.headers.items()}
            if skipped := set(stored) - kept - _read_apart(stored, request):
                _log.warning("%s: %d tensors are not served: %s", folder, len(skipped), _shown(skipped))
        # Layers ask for what is this rank's.
        self.shard = request.shard
        self._whole = request.shard.tensors(self.headers, request.spec)
        self.headers = request.shard.headers(self.headers, request.spec)
        self._factors = request.spec.factors
        self._inputs_first = request.spec.inputs_first and not is_gguf(folder)
        self._gguf = open_gguf(folder) if is_gguf(folder) else None
        self._block_readers = block_readers(coded=self.keeps_codes)
        self._unused = {name for name in self.headers if name.endswith(IGNORED_SUFFIXES)}
        self._left = set(self.headers) - self._unused
        self._suffixes = {name.rpartition(".")[2] for name in self.headers}
        self._bytes_total = sum(header.num_elements for header in self.headers.values()) or 1
        self._bytes_done = 0
        # Whether what is handed out lies in files, and is copied by those who take it.
        self._maps = is_packed and self._gguf is None and device.type == "cpu"
        # What several layers share, once one of them has read it.
        self.shared_blocks: dict[int, Any] = {}
        self._pages = MappedPages()
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pages.let_go()
        self._files.clear()
        self._stack.close()

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, converted. Raises CheckpointError when it is missing or of another shape."""
        tensor = self._floats(name, shape)
        return tensor.to(dtype or self._taken(tensor))

    def _floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As `stored`, and refused where the numbers are not what they stand for without a scale."""
        header = self._header(name, shape)
        if self._gguf is None and header.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{self._file(header)}: tensor {name} is stored in {header.dtype}, and nothing says what its "
                "numbers are scaled by; config.json lacks quantization_config, or does not mean this tensor"
            )
        return self.stored(name, shape)

    def _taken(self, stored: Tensor) -> torch.dtype:
        return torch.float16 if self._keeps_float16 and stored.dtype == torch.float16 else self.dtype

    def keep(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        """As `take`, for a tensor that is used as it is while the model lives."""
        stored = self._floats(name, shape)
        tensor = stored.to(dtype or self._taken(stored))
        if not self._is_packed or tensor.data_ptr() != stored.data_ptr():
            return tensor
        if self._maps and tensor.nbytes >= LARGE_TABLE_BYTES:
            return tensor
        return empty_on_huge_pages(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)

    def linear(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        calibrates: bool = False,
        order: Tensor | None = None,
    ) -> WeightFormat | PartedWeight:
        """The weight of the linear layers `names`, their outputs one after another, or in that `order`.

        With `calibrates` the caller sees to it that a weight comes back quantized only when the ranges of its
        inputs are known, so it is dense until then.
        """
        parts = [self._layer(name, size, inputs) for name, size in zip(names, outputs, strict=True)]
        weight = stack(parts, self.dtype)
        if order is not None:
            parts = [unblocked(part, self.dtype) for part in parts_of(weight)]
            weight = picked_rows(parts, order, self.dtype)
        if isinstance(weight, PartedWeight) or (calibrates and self.calibrates):
            return weight
        return self.quantized(weight)

    @property
    def calibrates(self) -> bool:
        """Whether weights are quantized only when the ranges of their inputs are known."""
        config = self.config
        return (
            self.scheme is None
            and self._reads_on
            and config.quantize == "w8a8"
            and config.quantization.smoothing == "calibrated"
        )

    @property
    def keeps_fp8(self) -> bool:
        """Whether a checkpoint's fp8 weights are multiplied as they are."""
        return self.kernels.names["linear"] == "triton"

    @property
    def keeps_codes(self) -> bool:
        """Whether codes of a few bits, and fp8 with inputs as they come, are multiplied so: by the native
        kernels.
        """
        return self._is_packed

    def quantized(self, weight: WeightFormat) -> WeightFormat:
        """`weight` as `engine.quantize` asks for; that of a quantized checkpoint stays as it is."""
        if self.scheme is not None or not isinstance(weight, DenseWeight):
            return weight
        return quantize(weight.values, self.config)

    def stacked(
        self, name: str, shape: tuple[int, int, int], *, inputs_first: bool = True
    ) -> Callable[[int], WeightFormat]:
        """Weights [X, N, K] of experts that share a tensor, inputs or outputs first, or MXFP4 blocks. The
        result is a function of the expert's index.
        """
        count, outputs, inputs = shape
        is_quantized = self.has(f"{name}_blocks") or self.has(f"{name}_scales")
        if self.scheme is not None and self.scheme.method == "mxfp4" and is_quantized:
            groups = inputs // MXFP4_GROUP
            blocks = self.stored(f"{name}_blocks", (count, outputs, groups, MXFP4_GROUP // 2))
            scales = self.stored(f"{name}_scales", (count, outputs, groups))
            if bool((scales == MXFP4_NAN).any()):
                raise self._not_finite(f"{name}_scales")
            coded = self.keeps_codes
            return lambda index: mxfp4_weight(blocks[index], scales[index], coded=coded)
        if not inputs_first:
            rows = self.take(name, shape)
            return lambda index: DenseWeight(values=rows[index])
        dense = self.take(name, (count, inputs, outputs))
        return lambda index: DenseWeight(values=dense[index].T.contiguous())

    def dense(self, name: str, shape: tuple[int, int], *, dtype: torch.dtype) -> Tensor:
        """The weight of the linear layer `name` as a dense tensor, however it is stored."""
        return self._layer(name, *shape).dequantize().to(dtype)

    def head(self, name: str, shape: tuple[int, int], rows: slice) -> WeightFormat:
        """Those rows of the weight of the layer `name` that makes logits, this rank's: others are padding,
        which is never drawn, or other ranks'.
        """
        if self.shard.size > 1:
            return self.quantized_head(self._layer(name, rows.stop - rows.start, shape[1]))
        weight = unblocked(self._layer(name, *shape), self.dtype)
        return self.quantized_head(rows_of(weight, rows))

    def tied_head(self, name: str, shape: tuple[int, int], embedding: Tensor, rows: slice) -> WeightFormat:
        """Those rows of the embedding `name` as the layer that makes logits: as the file holds it where
        products take that, else of the table that was read.
        """
        if self.keeps_codes and self.headers[f"{name}.weight"].dtype in self._block_readers:
            return rows_of(self._layer(name, *shape), rows)
        return self.quantized_head(DenseWeight(values=embedding[rows]))

    def quantized_head(self, weight: WeightFormat) -> WeightFormat:
        """A head as `engine.quantization.head` asks for."""
        config = self.config
        wanted = config.quantize != "off" and config.quantization.head == "int8"
        return int8_weight(weight.values) if wanted and isinstance(weight, DenseWeight) else weight

    def _layer(self, name: str, outputs: int, inputs: int) -> WeightFormat:
        weight = self._stored_layer(name, outputs, inputs)
        factors = next((each for each in self._factors if name.endswith(each.name)), None)
        if factors is None:
            return weight
        if not isinstance(weight, DenseWeight):
            raise CheckpointError(
                f"{self.folder}: {name} is quantized, and config.json multiplies what it gives; take the "
                "dense checkpoint, and set engine.quantize if it is to be smaller"
            )
        rows = [torch.full((count or outputs, 1), factor) for count, factor in factors.parts]
        values = weight.values
        return DenseWeight(values=(values.float() * torch.cat(rows).to(values.device)).to(values.dtype))

    def _stored_layer(self, name: str, outputs: int, inputs: int) -> WeightFormat:
        if self.scheme is not None:
            weight = read_weight(self, name, outputs, inputs, self.scheme)
            if weight is not None:
                if self._gguf is not None and not all(map(is_finite, scales_of(weight))):
                    raise self._not_finite(f"{name}.weight")
                return weight
        # The head is no layer of their kind.
        if self._inputs_first and name != "lm_head":
            return DenseWeight(values=self.take(f"{name}.weight", (inputs, outputs)).T.contiguous())
        return DenseWeight(values=self.take(f"{name}.weight", (outputs, inputs)))

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor `name` in its stored type; of any shape when that is None. Raises CheckpointError."""
        header = self._header(name, shape)
        if self._gguf is not None:
            tensor = self._own_of_gguf(self._gguf, name, header)
        else:
            try:
                tensor = self._own_part(name, header)
            except SafetensorError as error:
                raise CheckpointError(
                    f"{self._file(header)}: tensor {name} cannot be read: {error}"
                ) from error
        self._count(name, header)
        if self._maps:
            self._pages.read(tensor)
        if not is_finite(tensor):
            raise self._not_finite(name)
        return tensor.to(self.device)

    def _own_part(self, name: str, header: TensorHeader) -> Tensor:
        """What this rank has of a tensor: no more of the file is looked at."""
        file, stored = self._open(header.file), header.stored_name or name
        part = self.shard.part_of(name, self._whole[name].shape)
        if part is not None:
            view = file.get_slice(stored)
            runs = [view[:, run].contiguous() if part.axis else view[run] for run in part.slices]
            return runs[0] if len(runs) == 1 else torch.cat(runs, dim=part.axis)
        tensor: Tensor = file.get_tensor(stored)
        return tensor if self.shard.adds(name) else torch.zeros_like(tensor)

    def _own_of_gguf(self, file: GgufFile, name: str, header: TensorHeader) -> Tensor:
        part = self.shard.part_of(name, self._whole[name].shape)
        tensor = torch.from_numpy(file.array(header.stored_name or name, part))
        return tensor if self.shard.adds(name) else torch.zeros_like(tensor)

    def _file(self, header: TensorHeader) -> Path:
        return folder_of(self.folder) / header.file

    def _not_finite(self, name: str) -> CheckpointError:
        header = self.headers[name]
        return CheckpointError(
            f"{self._file(header)}: tensor {header.stored_name or name} holds numbers that are not finite; "
            "copy or download the file again, or repeat the conversion that wrote it"
        )

    def _header(self, name: str, shape: tuple[int, ...] | None) -> TensorHeader:
        header = self.headers.get(name)
        if header is None:
            near = difflib.get_close_matches(name, self._left, n=1)
            hint = f"; the checkpoint has {near[0]}" if near else ""
            of_shape = "" if shape is None else f" of shape {list(shape)}"
            raise CheckpointError(f"{self.folder}: tensor {name}{of_shape} is missing{hint}")
        if shape is not None and header.shape != shape:
            raise CheckpointError(
                f"{self._file(header)}: tensor {header.stored_name or name} has shape {list(header.shape)}, "
                f"but config.json implies {list(shape)}"
            )
        return header

    def _count(self, name: str, header: TensorHeader) -> None:
        # One that is read twice, as a table and as the head, counts once.
        if name in self._left:
            self._left.discard(name)
            self._bytes_done += header.num_elements
        self.progress("load weights", self._bytes_done / self._bytes_total)

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls the linear layer `name`."""
        suffixes = ("weight", "qweight", "weight_packed")
        found = (self.headers.get(f"{name}.{suffix}") for suffix in suffixes)
        header = next((each for each in found if each is not None), None)
        return header.stored_name.rpartition(".")[0] if header is not None and header.stored_name else name

    def cut_of(self, name: str) -> LinearCut | None:
        """What of the linear layer `name` this rank has; None where that is all."""
        header = self._whole.get(f"{name}.weight")
        part = None if header is None else self.shard.part_of(f"{name}.weight", header.shape)
        if header is None or part is None:
            return None
        return LinearCut(axis=part.axis, runs=part.runs, size=header.shape[part.axis])

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self.headers

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape that a tensor is stored in; None when it is missing."""
        header = self.headers.get(name)
        return None if header is None else header.shape

    def has_some(self, suffix: str) -> bool:
        """Whether any layer has a tensor whose name ends in a dot and `suffix`."""
        return suffix in self._suffixes

    def element_type(self, name: str) -> str:
        """Name of the type that a tensor is stored in; empty when it is missing."""
        header = self.headers.get(name)
        return "" if header is None else header.dtype

    def discard(self, name: str) -> None:
        """Declares a tensor that may be stored but is not needed, such as the tied copy of the embedding."""
        if name in self._left:
            self._left.remove(name)
            self._unused.add(name)

    def finish(self) -> None:
        """Raises CheckpointError when tensors are left that no layer took; logs those that are known and not
        used.
        """
        if self._left:
            raise CheckpointError(
                f"{self.folder}: {len(self._left)} unexpected tensors that the model does not have: "
                f"{_shown(self._left)}"
            )
        if self._unused:
            _log.warning(
                "%s: %d tensors are not used: %s", self.folder, len(self._unused), _shown(self._unused)
            )

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, Tensor] | None:
        """Type and rows of bytes of a tensor of a GGUF file, if the type has a form of its own here."""
        header = self._header(name, shape)
        if self._gguf is None or header.dtype not in self._block_readers:
            return None
        part = self.shard.part_of(name, self._whole[name].shape)
        kind, rows = self._gguf.blocks(header.stored_name or name, part)
        self._count(name, header)
        return kind, torch.from_numpy(rows.copy()).to(self.device)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                handle = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / file} cannot be opened: {error}") from error
            self._files[file] = self._stack.enter_context(handle)
        return self._files[file]


def _read_apart(stored: Iterable[str], request: LoadRequest) -> set[str]:
    """Names of tensors that belong to the layer that drafts, or, if that is what is read, to its model."""
    own, speculation = request.spec.prediction, request.config.speculation
    if own is None or speculation.method != MTP or speculation.draft_model:
        return set(stored) if isinstance(request.spec.draft_head, PredictionSpec) else set()
    return {name for name in stored if re.match(own.own, name)}


def unblocked(weight: WeightFormat, dtype: torch.dtype) -> WeightFormat:
    """A weight whose rows can be picked: those of fp8 blocks share scales."""
    if isinstance(weight, Fp8Weight) and weight.blocked:
        return DenseWeight(values=weight.dequantize().to(dtype))
    return weight


def _shown(names: set[str]) -> str:
    """Some of `names`, first one of each kind so that none hides behind many of another, and the number of
    the rest.
    """
    kinds: dict[str, str] = {}
    for name in sorted(names):
        kinds.setdefault(name.rpartition(".")[2], name)
    first = [*kinds.values(), *sorted(names - set(kinds.values()))][: max(5, len(kinds))]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
