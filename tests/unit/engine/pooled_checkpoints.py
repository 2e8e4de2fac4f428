"""Small random checkpoints of models that pool, in the form of sentence-transformers, and its formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from engine.runner.runner import ModelRunner
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput, SequenceResult
from tests.unit.engine.checkpoints import SMALL

_MODULES = "sentence_transformers.models."
MODES = {
    "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "weighted": "pooling_mode_weightedmean_tokens",
    "max": "pooling_mode_max_tokens",
}
_PLAIN = SamplingParams(temperature=0.0, max_tokens=1)


def pooled_checkpoint(
    folder: Path,
    model_type: str,
    *,
    auto: Any = transformers.AutoModel,
    seed: int = 0,
    pooling: str = "",
    normalize: bool = True,
    dense: int = 0,
    **changes: Any,
) -> Any:
    """Writes a random float32 checkpoint and returns transformers' model of it; `pooling` adds the modules'
    files, `dense` a Dense module of so many outputs.
    """
    values = {name: value for name, value in SMALL.items() if not name.endswith("_token_id")} | changes
    if model_type in ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "gte"):
        del values["num_key_value_heads"]
        values.setdefault("pad_token_id", 1)
    config = transformers.AutoConfig.for_model(model_type, **values)
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
            elif "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(std=0.5)
    model.eval()
    model.save_pretrained(folder)
    if pooling:
        _write_modules(folder, config.hidden_size, pooling, normalize=normalize, dense=dense)
    return model


def _write_modules(folder: Path, size: int, pooling: str, *, normalize: bool, dense: int) -> None:
    names = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    paths = ["" if name == "Transformer" else f"{index}_{name}" for index, name in enumerate(names)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"{_MODULES}{name}"}
        for index, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {key: name == pooling for name, key in MODES.items()}
    told = {"word_embedding_dimension": size, "pooling_mode_mean_sqrt_len_tokens": False, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
    if dense:
        from safetensors.torch import save_file

        (folder / "2_Dense").mkdir()
        activation = "torch.nn.modules.activation.Tanh"
        shape = {"in_features": size, "out_features": dense, "bias": True, "activation_function": activation}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(shape))
        weights = {"linear.weight": torch.randn(dense, size) * 0.2, "linear.bias": torch.randn(dense) * 0.2}
        save_file(weights, folder / "2_Dense" / "model.safetensors")


def reference_embedding(
    model: Any, token_ids: Sequence[int], pooling: str, *, folder: Path | None = None, normalize: bool = True
) -> NDArray[np.float64]:
    """What sentence-transformers makes of one text, in float32 like it."""
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([list(token_ids)])).last_hidden_state[0].float()
    weights = torch.arange(1, hidden.shape[0] + 1, dtype=torch.float32)[:, None]
    pooled = {
        "cls": lambda: hidden[0],
        "last": lambda: hidden[-1],
        "mean": lambda: hidden.mean(0),
        "weighted": lambda: (hidden * weights).sum(0) / weights.sum(),
        "max": lambda: hidden.max(0).values,
    }[pooling]()
    if folder is not None and (folder / "2_Dense").is_dir():
        from safetensors.torch import load_file

        found = load_file(folder / "2_Dense" / "model.safetensors")
        pooled = torch.tanh(pooled @ found["linear.weight"].T + found["linear.bias"])
    pooled = torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled
    return np.asarray(pooled.numpy(), np.float64)


def cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Of two vectors, in float64."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def pool(
    runner: ModelRunner, texts: Sequence[Sequence[int]], *, chunk: int = 0, seed: int = 0, **options: Any
) -> list[NDArray[np.float32]]:
    """What a runner makes of texts, in one step with scattered blocks; or in chunks, one after another."""
    size = runner.storage.block_size
    blocks = np.random.default_rng(seed).permutation(runner.storage.num_blocks)
    new, ends, at = [], [len(text) for text in texts], 0
    pooling = options.pop("pooling", None)
    for index, text in enumerate(texts):
        count = -(-len(text) // size)
        new.append(
            NewSequence(
                index + 1,
                tuple(text),
                len(text),
                _PLAIN,
                0,
                None,
                "",
                tuple(map(int, blocks[at : at + count])),
                pooling=pooling[index] if pooling else None,
            )
        )
        at += count
    found: dict[int, SequenceResult] = {}
    starts = [0] * len(texts)
    step_id = 0
    while any(start < end for start, end in zip(starts, ends, strict=True)):
        step_id += 1
        scheduled = []
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            count = min(end - start, chunk or end)
            if count:
                scheduled.append(ScheduledSequence(index + 1, start, count, (), start + count == end))
                starts[index] += count
        plan = SchedulerOutput(
            step_id, new_sequences=tuple(new) if step_id == 1 else (), scheduled=tuple(scheduled)
        )
        for result in runner.launch(plan).wait().results:
            found[result.sequence_id] = result
    released = tuple(range(1, len(texts) + 1))
    runner.launch(SchedulerOutput(step_id + 1, released=released)).wait()
    for result in found.values():
        assert not result.failure, result.failure
    return [np.frombuffer(found[index + 1].pooled, "<f4") for index in range(len(texts))]
