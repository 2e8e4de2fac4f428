"""What quantization costs in quality: perplexity of the bundled model in every form, float32 beside it.

    python -m benchmarks.quantization --json benchmarks/results/quantization.json

The text is held out: documents of models/corpus from the evaluation split (no name, record or sum in a
question occurs in training), drawn with a seed of their own. Perplexity is that of the assistant's tokens;
"all tokens" counts the questions as well. "same" is the share of positions whose likeliest token is that of
float32, and "shift" the mean absolute change of a token's log-probability.

The AWQ, GPTQ, compressed-tensors and GGUF checkpoints are the bundled weights rounded to nearest and stored
in those formats: they show what the formats and their readers do, not what those methods' calibration gains.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.engine.report import options, publish
from benchmarks.peers.tables import FORMS
from engine.config import CacheConfig, EngineConfig, QuantizationConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from models.batches import encode
from models.corpus import Mixture, documents
from runtime.config import ModelConfig
from tests.unit.engine.quantization import gguf_writer, k_quants, writers
from tests.unit.engine.quantization.writers import Writer

BUNDLED = Path("models/millrace-nano")
SEED = 31_337
MIXTURE = Mixture(sequence_length=1024, recall_share=0.3)

Checkpoint = Callable[[Path], None]
SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One form of the model."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    # Writes another checkpoint into a copy of the bundled one, and returns what is to be opened.
    convert: Callable[[Path], Path] | None = None


@dataclass(frozen=True)
class Scores:
    """Of every predicted token: log-probability, and the likeliest token."""

    logprobs: NDArray[np.float64]
    best: NDArray[np.int64]
    weights_bytes: int


def held_out(num_documents: int) -> list[tuple[list[int], NDArray[np.bool_]]]:
    """Token ids of documents, and which of them the assistant says."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    source = documents(MIXTURE, SEED, "eval")
    rows = (encode(tokenizer, next(source)) for _ in range(num_documents))
    return [(ids, np.array(weights) > 0) for ids, weights in rows]


def score(folder: Path, options: dict[str, Any], prompts: list[list[int]]) -> Scores:
    """Runs every prompt through the engine's own runner."""
    cache = CacheConfig(kv_cache_bytes=64 << 20, **options.pop("cache", {}))
    config = EngineConfig(**{"cache": cache, **options})
    runner, plan, _ = build_here(config, ModelConfig(path=str(folder)), lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    logprobs: list[float] = []
    best: list[int] = []
    try:
        for step, prompt in enumerate(prompts):
            blocks = tuple(range(-(-(len(prompt) + 1) // plan.block_size)))
            released = (step - 1,) if step else ()
            scheduled = ScheduledSequence(step, 0, len(prompt), (), True, ())
            new = NewSequence(step, tuple(prompt), len(prompt), SCORING, 0, None, "", blocks)
            result = runner.launch(SchedulerOutput(step, (new,), (scheduled,), released)).wait()
            for entry in result.results[0].prompt_logprobs:
                logprobs.append(entry.logprob)
                best.append(entry.top_ids[0])
    finally:
        runner.close()
    return Scores(np.array(logprobs), np.array(best), plan.weights_bytes)


# --- checkpoints in other formats ---------------------------------------------------------------------------


def _stored(settings: dict[str, Any], writer: Writer) -> Callable[[Path], Path]:
    def convert(folder: Path) -> Path:
        model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
        writers.rewrite(folder, model, settings, writer)
        return folder

    return convert


def _gguf(kinds: dict[str, Kind]) -> Callable[[Path], Path]:
    def convert(folder: Path) -> Path:
        model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
        theta = json.loads((BUNDLED / "config.json").read_text())["rope_theta"]
        rounded = {Kind.Q4_K: k_quants.q4_k, Kind.Q6_K: k_quants.q6_k}
        gguf_writer.write(folder / "model.gguf", model, "qwen3", kinds, rope_theta=theta, rounded=rounded)
        return folder / "model.gguf"

    return convert


def _in_importance(weight: torch.Tensor) -> writers.Stored:
    order = np.random.default_rng(0).permutation(weight.shape[1])
    return writers.gptq(weight, group_size=128, symmetric=False, permutation=order)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def variants() -> Iterator[Variant]:
    """float32 first: everything is compared with it."""
    yield Variant(name="float32", options={"dtype": "float32", "native": "off"})
    yield Variant(name="bfloat16", options={"dtype": "bfloat16"})
    yield Variant(name="int8 (W8A16)", options={"quantize": "int8"})
    dense_head = {"quantization": QuantizationConfig(head="dense")}
    yield Variant(name="int8 (W8A16), head dense", options={"quantize": "int8", **dense_head})
    yield Variant(name="int8 (W8A8), smoothed", options={"quantize": "w8a8"})
    unsmoothed = QuantizationConfig(smoothing="off")
    yield Variant(name="int8 (W8A8), not smoothed", options={"quantize": "w8a8", "quantization": unsmoothed})
    for size in (32, 64, 128):
        grouped = QuantizationConfig(group_size=size)  # type: ignore[arg-type]
        yield Variant(name=f"int4, groups of {size}", options={"quantize": "int4", "quantization": grouped})
    for kind in ("bfloat16", "int8", "fp8", BY_CHANNEL):
        cache = {"kv_dtype": kind, "block_size": KEY_GROUP}
        yield Variant(name=f"float32, {kind} KV", options={"dtype": "float32", "cache": cache})
    # What the tables beside other servers run.
    for quantize in ("int8", "w8a8", "int4"):
        both = {"dtype": "bfloat16", "quantize": quantize, "cache": {"kv_dtype": "int8"}}
        yield Variant(name=FORMS[quantize], options=both)
    yield Variant(name="AWQ, groups of 128", convert=_stored(_AWQ, partial(writers.awq, group_size=128)))
    gptq = partial(writers.gptq, group_size=128, symmetric=False)
    yield Variant(name="GPTQ, groups of 128", convert=_stored(_GPTQ, gptq))
    yield Variant(name="GPTQ, act order", convert=_stored(_GPTQ, _in_importance))
    eight = partial(writers.gptq, bits=8, group_size=128)
    yield Variant(name="GPTQ, 8 bits", convert=_stored(_GPTQ | {"bits": 8}, eight))
    packed = _compressed("pack-quantized", {"num_bits": 4, "strategy": "group"})
    yield Variant(
        name="compressed-tensors int4, groups of 128",
        convert=_stored(packed, partial(writers.packed, group_size=128)),
    )
    int8 = _compressed("int-quantized", _INT8, _PER_TOKEN)
    yield Variant(name="compressed-tensors W8A8", convert=_stored(int8, writers.int_quantized))
    fp8 = _compressed("float-quantized", _FP8)
    yield Variant(name="compressed-tensors fp8", convert=_stored(fp8, writers.float_quantized))
    for gguf_kind in (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q6_K, Kind.Q4_K):
        kinds = {"token_embd": gguf_kind if gguf_kind in (Kind.F16, Kind.BF16) else Kind.Q8_0}
        if gguf_kind in (Kind.Q4_K, Kind.Q6_K):
            # Its rows are no multiple of 256.
            kinds["ffn_down"] = Kind.Q8_0
        yield Variant(name=f"GGUF {gguf_kind.name}", convert=_gguf({**kinds, "": gguf_kind}))


# --- figures ------------------------------------------------------------------------------------------------


def _row(name: str, scores: Scores, baseline: Scores, said: NDArray[np.bool_]) -> dict[str, Any]:
    shift = np.abs(scores.logprobs - baseline.logprobs)[said]
    return {
        "form": name,
        "perplexity": round(math.exp(-float(scores.logprobs[said].mean())), 4),
        "all tokens": round(math.exp(-float(scores.logprobs.mean())), 3),
        "shift": round(float(shift.mean()), 4),
        "same %": round(100 * float((scores.best == baseline.best)[said].mean()), 2),
        "weights MiB": round(scores.weights_bytes / 2**20, 2),
    }


def measure(num_documents: int, only: str) -> tuple[list[dict[str, Any]], int]:
    """One row per variant (float32, and those whose name holds `only`), and the number of scored tokens."""
    texts = held_out(num_documents)
    prompts = [ids for ids, _ in texts]
    # The first token of a document is not predicted.
    said = np.concatenate([weights[1:] for _, weights in texts])
    baseline: Scores | None = None
    rows = []
    for variant in variants():
        if baseline is not None and only not in variant.name:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = BUNDLED
            if variant.convert is not None:
                folder = Path(place) / "model"
                shutil.copytree(BUNDLED, folder)
                folder = variant.convert(folder)
            scores = score(folder, dict(variant.options), prompts)
        baseline = baseline or scores
        rows.append(_row(variant.name, scores, baseline, said))
        Console().print(rows[-1])
    return rows, int(said.sum())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--only", default="", help="part of the names of the forms to measure")
    arguments = parser.parse_args()
    rows, num_tokens = measure(arguments.documents, arguments.only)
    title = f"Perplexity of {BUNDLED.name} on {num_tokens} held-out tokens of {arguments.documents} documents"
    publish(title, rows, arguments.json)


if __name__ == "__main__":
    main()
