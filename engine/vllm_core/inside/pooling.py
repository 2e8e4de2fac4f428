"""A model that pools what it reads: how vLLM is asked, and its rows as the suite's own engine has them.

vLLM pools, and puts dense layers or a classifier's head behind it. Cutting to fewer dimensions, norms and
activations are done here, by what the checkpoint says of itself (`checkpoint.pooling.PoolingFiles` as
msgpack gives it), so that both makes of engine answer alike.
"""

from __future__ import annotations

from typing import Any

# vLLM's names of what is done over a text's tokens.
_KINDS = {"cls": "CLS", "last": "LAST", "mean": "MEAN"}
# Lengths below it are taken for zero, as sentence-transformers does.
_LEAST_LENGTH = 1e-12


class CannotPool(Exception):
    """vLLM lacks what the checkpoint asks for."""


def classifies(files: dict[str, Any]) -> bool:
    """Whether a head gives logits of labels."""
    return "classify" in files["asked"]["tasks"]


def arguments(files: dict[str, Any], *, caches: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs; `pooler_config` are those of its PoolerConfig. Raises
    CannotPool.

    Where prefixes may be kept (`caches`), vLLM decides whether this model can: it ends where blocks of an
    encoder are to be found again. No text is sent to an engine for what it keeps, so nothing is told of it.
    """
    pooler: dict[str, Any] = {"use_activation": False}
    if not classifies(files):
        if files["kind"] not in _KINDS:
            raise CannotPool(
                f"vLLM has no pooling {files['kind']!r}, only {', '.join(_KINDS)}; serve this model with "
                'engine.make = "millrace"'
            )
        pooler["seq_pooling_type"] = _KINDS[files["kind"]]
    return {
        "runner": "pooling",
        "pooler_config": pooler,
        "enable_prefix_caching": None if caches else False,
        "kv_events_config": None,
    }


def params_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vLLM's PoolingParams for `contract.pooling.PoolingParams`."""
    params: dict[str, Any] = {
        "task": "embed" if asked["task"] == "embed" else "classify",
        "use_activation": False,
    }
    if asked["second_start"]:
        params["extra_kwargs"] = {"compressed_token_type_ids": asked["second_start"]}
    return params


def numbers_of(row: Any, files: dict[str, Any], dimensions: int) -> bytes | None:
    """The answer: float32, little-endian. None where a number is not finite.

    Args:
        row: A torch tensor of what vLLM made of one text.
        files: What the checkpoint says.
        dimensions: How many of an embedding's leading elements are wanted; 0 is all.
    """
    import torch

    row = row.detach().to("cpu", torch.float32).flatten()
    if classifies(files):
        if files["activation"] == "sigmoid":
            row = row.sigmoid()
        elif files["activation"] == "softmax":
            row = row.softmax(0)
    else:
        row = row[:dimensions] if dimensions else row
        row = row / row.norm().clamp_min(_LEAST_LENGTH) if files["normalized"] else row
    if not bool(row.isfinite().all()):
        return None
    return bytes(row.contiguous().numpy().astype("<f4").tobytes())
