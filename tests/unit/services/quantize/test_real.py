"""Every scheme by every method on a small random model, by llm-compressor itself: this engine's logits are
those that transformers gives for the folder which was written.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from engine.types import SamplingParams
from services.quantize import environment
from services.quantize.calibration import CalibrationSet, read_calibration
from services.quantize.choices import CALIBRATED, MethodName, SchemeName
from services.quantize.dense import write_dense
from services.quantize.run import LayerProgress, Quantized, QuantizeJob, choose_group, compress
from services.supervisor.config import BUNDLED_MODEL
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.quantization.gguf_writer import write
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "vocab_size": 2048,
}
# How far apart log-probabilities may be;
# where inputs are rounded to int8, in the mean (the oracle rounds none).
CASES: tuple[tuple[SchemeName, MethodName, float], ...] = (
    ("int8", "rtn", 1e-3),
    ("int8", "awq", 1e-3),
    ("int8", "gptq", 1e-3),
    ("int4", "rtn", 1e-3),
    ("int4", "awq", 1e-3),
    ("int4", "gptq", 1e-3),
    ("w8a8", "rtn", 0.2),
    ("w8a8", "gptq", 0.2),
    ("w8a8", "smoothquant", 0.2),
    ("fp8", "rtn", 1e-3),
    ("mxfp4", "rtn", 1e-3),
    ("nf4", "rtn", 1e-3),
)
_ORACLE = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
folder, target, ids = sys.argv[1], sys.argv[2], [int(each) for each in sys.argv[3].split(",")]
stored = getattr(AutoConfig.from_pretrained(folder), "quantization_config", {})
# What weights stand for, without the rounding of inputs; those of MXFP4 are taken apart in bfloat16, which
# float32 inputs do not go with.
changed = stored.get("format") in ("int-quantized", "float-quantized", "mxfp4-pack-quantized")
settings = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if changed else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
if stored.get("quant_method") == "bitsandbytes":
    # Its own product rounds to bfloat16 on some processors.
    model = model.dequantize().float()
if changed:
    from compressed_tensors.quantization import disable_quantization
    model = model.float().apply(disable_quantization)
with torch.no_grad():
    save_file({"logits": model(torch.tensor([ids])).logits[0].float().contiguous()}, target)
"""


def model(folder: Path) -> Path:
    make_checkpoint(folder, "llama", **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED_MODEL / name, folder / name)
    return folder


def texts(folder: Path) -> CalibrationSet:
    rows: list[dict[str, Any]] = [
        {"text": f"The {n} lighthouse keepers wrote down the weather." * 3} for n in range(6)
    ]
    rows.append(
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    )
    path = folder / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_calibration(str(path), divided=False, most=100)


def made(
    checkpoint: Path,
    out: Path,
    scheme: SchemeName,
    method: MethodName,
    *,
    memory_bytes: int = 0,
    stop_after: int = 0,
) -> Quantized:
    """`stop_after`: the run is interrupted when so many layers are done."""
    job = QuantizeJob(
        model=str(checkpoint),
        checkpoint=checkpoint,
        scheme=scheme,
        method=method,
        group_size=choose_group(checkpoint, scheme, None),
        out=out,
        calibration=texts(out.parent) if method in CALIBRATED else None,
        memory_bytes=memory_bytes,
        threads=1,
    )

    def advance(layer: LayerProgress) -> None:
        if layer.done == stop_after:
            raise KeyboardInterrupt

    return compress(job, lambda found, folder: None, lambda text: None, advance)


def by_transformers(python: Path, folder: Path, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V]."""
    target = folder.parent / f"{folder.name}.logits"
    command = [str(python), "-P", "-c", _ORACLE, str(folder), str(target), ",".join(map(str, prompt))]
    asked = subprocess.run(
        command, env=environment.child_variables(), capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr[-2000:]
    return torch.log_softmax(load_file(target)["logits"], -1)


def by_engine(folder: Path, prompt: list[int], vocab_size: int) -> torch.Tensor:
    """Log-probabilities [T - 1, V] of all but the first position's successor."""
    probe = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=vocab_size)
    with closing(open_runner(folder, native="off")) as runner:
        (job,) = Driver(runner).run([Job(prompt, num_tokens=1, sampling=probe)])
    rows = []
    for entry in job.prompt_logprobs:
        row = torch.empty(vocab_size)
        row[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
        rows.append(row)
    return torch.stack(rows)


def assert_agrees(python: Path, folder: Path, tolerance: float, *, in_the_mean: bool = False) -> None:
    vocab_size = SIZES["vocab_size"]
    prompt = prompt_of(33, vocab_size)
    expected, ours = by_transformers(python, folder, prompt), by_engine(folder, prompt, vocab_size)
    expected = expected[: len(ours)]
    if in_the_mean:
        # As far as rounding of inputs moves them, and far less than another model would.
        assert float((ours - expected).abs().mean()) < tolerance
        assert float((ours - expected.roll(1, 0)).abs().mean()) > 5 * tolerance
    else:
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("scheme", "method", "tolerance"), CASES)
def test_the_engine_agrees_with_transformers_on_what_was_written(
    scheme: SchemeName, method: MethodName, tolerance: float, tmp_path: Path, quantizer: Path
) -> None:
    checkpoint = model(tmp_path / "model")
    found = made(checkpoint, tmp_path / "out", scheme, method)
    assert found.bytes_after < found.bytes_before
    assert found.peak_bytes > 100 << 20
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == ("bitsandbytes" if scheme == "nf4" else "compressed-tensors")
    assert_agrees(quantizer, tmp_path / "out", tolerance, in_the_mean=scheme == "w8a8")


@pytest.mark.usefixtures("quantizer")
@pytest.mark.parametrize(("scheme", "method"), [("int4", "gptq"), ("int4", "awq"), ("int4", "rtn")])
def test_an_interrupted_run_goes_on_to_the_same_tensors(
    scheme: SchemeName, method: MethodName, tmp_path: Path
) -> None:
    checkpoint = model(tmp_path / "model")
    whole = made(checkpoint, tmp_path / "whole", scheme, method)
    with pytest.raises(KeyboardInterrupt):
        made(checkpoint, tmp_path / "out", scheme, method, stop_after=2)
    assert not (tmp_path / "out").exists()
    resumed = made(checkpoint, tmp_path / "out", scheme, method)
    assert resumed.key == whole.key
    assert resumed.kept_layers >= 2
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.usefixtures("quantizer")
def test_weights_beyond_the_bound_lie_on_disk_and_change_nothing(tmp_path: Path) -> None:
    checkpoint = model(tmp_path / "model")
    made(checkpoint, tmp_path / "whole", "int4", "gptq")
    bounded = made(checkpoint, tmp_path / "out", "int4", "gptq", memory_bytes=1 << 20)
    assert bounded.offloaded_bytes > bounded.bytes_before // 2
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_turned_dense(family: str, tmp_path: Path, quantizer: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", family, **SIZES)
    kinds = {"token_embd": Kind.Q8_0, "": Kind.Q8_0}
    write(tmp_path / "model.gguf", oracle, family, kinds, rope_theta=10_000.0)
    shutil.copyfile(BUNDLED_MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    write_dense(tmp_path / "model.gguf", tmp_path / "dense")
    # Rounded to bfloat16, of which the engine's own reading of the file knows nothing.
    prompt = prompt_of(33, SIZES["vocab_size"])
    expected = by_transformers(quantizer, tmp_path / "dense", prompt)
    ours = by_engine(tmp_path / "model.gguf", prompt, SIZES["vocab_size"])
    assert float((ours - expected[: len(ours)]).abs().mean()) < 0.1
    assert_agrees(quantizer, tmp_path / "dense", 1e-3)
