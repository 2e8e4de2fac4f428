"""Weights of a few bits stay so: their meaning is exact, and native kernels multiply them as they lie."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from checkpoint.gguf_reader import open_gguf
from engine.config import EngineConfig, PackedWeightsConfig
from engine.model import plan_command
from engine.model.kept_weights import KeptWeights
from engine.model.loader import load_here
from engine.model.plan import make_plan, plan_input, weights_bytes
from engine.quantization.gguf_blocks import block_readers
from engine.runner.build import build_here
from kernels.linear.formats import (
    CodedWeight,
    DenseWeight,
    Fp8Weight,
    Int8Weight,
    PartedWeight,
    parts_of,
    picked_rows,
    rows_of,
    stack,
)
from kernels.linear.packed import BFLOAT16, CODED, FLOAT8, FLOAT_CODES, INT8_GROUPED
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.quantization import writers
from tests.unit.engine.quantization.gguf_writer import drawn_blocks, write
from tests.unit.engine.quantization.test_gguf import WIDE, write_experts
from tests.unit.engine.quantization.test_stored import FP8, SIZES, assert_equals, compressed
from tests.unit.engine.quantization.writers import Writer, rewrite, stored_bytes
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

BITS = {
    Kind.Q2_K: 2,
    Kind.Q3_K: 3,
    Kind.Q4_K: 4,
    Kind.Q5_K: 5,
    Kind.Q6_K: 6,
    Kind.IQ4_NL: 4,
    Kind.IQ4_XS: 4,
    Kind.Q5_0: 5,
    Kind.Q5_1: 5,
}

# Of log-probabilities: native products round rows to 16 bits by groups, for every form of a few bits.
ROUNDED = 5e-3


def coded(kind: Kind, rows: int = 5, inputs: int = 512, seed: int = 0) -> CodedWeight:
    weight = block_readers(coded=True)[kind.name](drawn_blocks(kind, rows, inputs, seed))
    assert isinstance(weight, CodedWeight)
    return weight


@pytest.mark.parametrize("kind", BITS)
def test_blocks_mean_what_the_gguf_package_says_bit_for_bit(kind: Kind) -> None:
    weight = coded(kind)
    meant = gguf.quants.dequantize(drawn_blocks(kind, 5, 512).numpy(), kind)
    assert weight.bits == BITS[kind]
    assert torch.equal(weight.dequantize(), torch.from_numpy(meant))
    some = torch.tensor([3, 0])
    assert torch.equal(rows_of(weight, some).dequantize(), weight.dequantize()[some])


@pytest.mark.parametrize(("first", "second"), list(combinations(BITS, 2)))
def test_layers_of_two_types_stay_apart(first: Kind, second: Kind) -> None:
    parts = [coded(first, 3), coded(first, 2), coded(second, 4, seed=1), coded(first, 1)]
    whole = stack(parts, torch.float32)
    expected = torch.cat([part.dequantize() for part in parts])
    assert [part.shape[0] for part in parts_of(whole)] == [5, 4, 1]
    assert torch.equal(whole.dequantize(), expected)
    order = torch.tensor([6, 2, 0, 3, 9, 8, 5])
    some = picked_rows(parts_of(whole), order, torch.float32)
    assert [part.shape[0] for part in parts_of(some)] == [1, 4, 2]
    assert torch.equal(some.dequantize(), expected[order])


@pytest.mark.parametrize("kind", BITS)
def test_a_model_of_each_type_is_multiplied_as_stored(kind: Kind, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    write(tmp_path / "model.gguf", oracle, "llama", {"token_embd": Kind.F16, "": kind})
    found = assert_equals(tmp_path / "model.gguf", oracle, tolerance=ROUNDED, native="required")
    assert found == CODED + BITS[kind]


def test_a_file_of_q4_k_m_is_nowhere_dense(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.": Kind.Q6_K, "": Kind.Q4_K}
    path = tmp_path / "model.gguf"
    write(path, oracle, "llama", kinds)
    found = assert_equals(path, oracle, tolerance=2 * ROUNDED, native="required")
    assert found == [CODED + 4, CODED + 6]
    runner = open_runner(path, native="required", dtype="bfloat16")
    linears = [*runner.model.model.layers[0].linears(), runner.model.model.head]
    found = [part.struct.format - CODED for linear in linears for part in linear.packed_parts]
    runner.close()
    assert sorted(found) == [4, 4, 6, 6, 6, 6]


def packed_bytes(folder: Path) -> int:
    """Bytes of what multiplies in a model that is loaded for the native kernels."""
    runner = open_runner(folder, native="required", dtype="bfloat16")
    model = runner.model.model
    linears = [linear for layer in model.layers for linear in (*layer.linears(), *layer.routed_linears())]
    weights = [part for linear in (*linears, model.head) for part in linear.packed_parts]
    runner.close()
    return sum(sum(weight.sizes.values()) for weight in weights)


def planned_bytes(folder: Path) -> int:
    given = plan_input(
        EngineConfig(dtype="bfloat16"), ModelConfig(path=str(folder)), device="cpu", available_bytes=8 << 30
    )
    assert make_plan(given).weights_bytes > given.weights.fixed_bytes
    return given.weights.fixed_bytes


@pytest.mark.parametrize("kind", BITS)
def test_the_plan_counts_what_lies_in_memory(kind: Kind, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", vocab_size=208, **WIDE)
    write(tmp_path / "model.gguf", oracle, "llama", {"token_embd": Kind.F16, "": kind})
    # Books are not counted: 16 bytes of a layer.
    packed = packed_bytes(tmp_path / "model.gguf")
    assert planned_bytes(tmp_path / "model.gguf") == pytest.approx(packed, rel=1e-3)


# Types of tensors in files that have several, by parts of their names.
MIXED = {
    "Q4_K_M": {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "": Kind.Q4_K},
    "Q4_K_M of narrow layers": {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q8_0, "": Kind.Q5_0},
    "Q4_0 beside Q4_1": {"attn_k": Kind.Q4_1, "ffn_up": Kind.Q4_1, "": Kind.Q4_0},
    "gate unlike up": {"ffn_gate": Kind.Q5_K, "attn_q": Kind.IQ4_XS, "": Kind.Q3_K},
}


@pytest.mark.parametrize("name", MIXED)
def test_the_plan_counts_files_of_several_types(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = make_checkpoint(tmp_path / "original", "llama", vocab_size=208, **WIDE)
    write(path, oracle, "llama", {"token_embd": Kind.F16} | MIXED[name])
    assert planned_bytes(path) == pytest.approx(packed_bytes(path), rel=1e-3)
    # What torch multiplies, types that are dense to it included.
    config = EngineConfig(dtype="bfloat16", native="off")
    given = plan_input(config, ModelConfig(path=str(path)), device="cpu", available_bytes=8 << 30)
    runner = open_runner(path, native="off", dtype="bfloat16")
    model = runner.model
    linears = [*(linear for layer in model.layers for linear in layer.linears()), model.head]
    loaded = sum(stored_bytes(part) for linear in linears for part in parts_of(linear.weight))
    runner.close()
    norms = sum(each.numel() for each in oracle.parameters() if each.dim() == 1)
    planned = weights_bytes(given.weights, "bfloat16") - 2 * norms - model.embedding.nbytes
    assert planned == loaded


@pytest.mark.parametrize("native", ["off", "required"])
@pytest.mark.parametrize("name", MIXED)
def test_files_of_several_types_equal_transformers(name: str, native: str, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    write(tmp_path / "model.gguf", oracle, "llama", {"token_embd": Kind.F16} | MIXED[name])
    found = assert_equals(tmp_path / "model.gguf", oracle, tolerance=2 * ROUNDED, native=native)
    if native == "required":
        assert len(found) > 1


@pytest.mark.parametrize("native", ["off", "required"])
def test_experts_whose_gate_is_of_another_type(native: str, tmp_path: Path) -> None:
    # All are active: which are chosen would follow from what is rounded.
    sizes = SIZES | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 4}
    oracle = make_checkpoint(
        tmp_path / "original", "mixtral", rope_parameters=WIDE["rope_parameters"], **sizes
    )
    path = tmp_path / "model.gguf"
    kinds = {"token_embd": Kind.F16, "ffn_gate_inp": Kind.F32, "": Kind.Q8_0}
    types = {"gate": Kind.Q4_0, "up": Kind.Q8_0, "down": Kind.Q4_1}
    write_experts(path, oracle, "llama", kinds, {"expert_count": 4, "expert_used_count": 4}, types)
    assert_equals(path, oracle, tolerance=2 * ROUNDED, native=native)
    if native == "required":
        # In the serving type, which is counted elsewhere; outputs are filled up to 16.
        routers = len(oracle.model.layers) * 4 * 16 * 64
        assert planned_bytes(path) == pytest.approx(packed_bytes(path) - routers, rel=2e-2)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NVFP4 = compressed(
    "nvfp4-pack-quantized",
    type="float",
    strategy="tensor_group",
    group_size=16,
    inputs={"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"},
)
MXFP4 = compressed("mxfp4-pack-quantized", type="float", scale_dtype="torch.uint8")
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
CASES: dict[str, tuple[dict[str, Any], Writer, int, dict[str, Any]]] = {
    "nf4": (BNB, writers.nf4, FLOAT_CODES, SIZES),
    "nf4 nested": (BNB, partial(writers.nf4, nested=True), FLOAT_CODES, SIZES),
    "nf4 across outputs": (BNB, partial(writers.nf4, size=64), BFLOAT16, SIZES | {"intermediate_size": 80}),
    "mxfp4": (MXFP4, writers.mxfp4_packed, CODED + 4, SIZES),
    "nvfp4": (NVFP4, partial(writers.nvfp4, divides=True), CODED + 4, SIZES),
    "nvfp4 of the Model Optimizer": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        partial(writers.nvfp4, divides=False),
        CODED + 4,
        SIZES,
    ),
    "fp8": (compressed("float-quantized", **FP8), writers.float_quantized, FLOAT8, SIZES),
    "fp8 of the Model Optimizer": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        partial(writers.float_quantized, per_tensor=True),
        FLOAT8,
        SIZES,
    ),
    "fp8 blocks": (
        BLOCKS,
        partial(writers.block_fp8, block=128),
        FLOAT8,
        SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("native", ["off", "required"])
def test_checkpoints_equal_transformers(name: str, native: str, tmp_path: Path) -> None:
    settings, writer, packed, sizes = CASES[name]
    oracle = make_checkpoint(tmp_path, "llama", **sizes)
    rewrite(tmp_path, oracle, settings, writer)
    found = assert_equals(tmp_path, oracle, tolerance=1e-3, native=native)
    if native == "off":
        assert found is (Int8Weight if name == "mxfp4" else DenseWeight)
    elif packed != BFLOAT16:
        assert found == packed


@pytest.mark.parametrize("name", [name for name in CASES if "across" not in name])
def test_the_plan_counts_checkpoints(name: str, tmp_path: Path) -> None:
    settings, writer, _, _ = CASES[name]
    oracle = make_checkpoint(tmp_path, "llama", vocab_size=208, **WIDE)
    rewrite(tmp_path, oracle, settings, writer)
    edit_config(tmp_path, vocab_size=208)
    # The head is dense, in the serving type and perhaps in fewer bits.
    runner = open_runner(tmp_path, native="required", dtype="bfloat16")
    head = sum(runner.model.model.head.weight.sizes.values())
    runner.close()
    assert planned_bytes(tmp_path) == pytest.approx(packed_bytes(tmp_path) - head, rel=0.02)


def test_experts_of_gpt_oss_stay_four_bits(tmp_path: Path) -> None:
    sizes = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    rope = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 64}
    oracle = make_checkpoint(
        tmp_path, "gpt_oss", rope_parameters=rope | {"rope_theta": 1e4}, **SIZES, **sizes
    )
    tensors = load_file(tmp_path / "model.safetensors")
    for layer, module in enumerate(oracle.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            dense = tensors.pop(name)  # [X, K, N]
            made = [writers.mxfp4(expert.T.contiguous()) for expert in dense]
            tensors[f"{name}_blocks"] = torch.stack([blocks for blocks, _, _ in made])
            tensors[f"{name}_scales"] = torch.stack([scales for _, scales, _ in made])
            with torch.no_grad():
                getattr(module.mlp.experts, part).copy_(torch.stack([m.T for _, _, m in made]))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["x"]})
    assert_equals(tmp_path, oracle, tolerance=1e-3, native="required")
    runner = open_runner(tmp_path, native="required")
    expert = runner.model.model.layers[0].feed_forward.experts[0].gate_up.weight
    runner.close()
    assert expert.struct.format == CODED + 4
    weights = expert.inputs * expert.outputs
    assert expert.sizes["data"] + expert.sizes["steps"] == weights // 2 + weights // 32


def test_what_a_product_rounds_is_part_of_fp8(tmp_path: Path) -> None:
    values = torch.randn(4, 128).to(torch.float8_e4m3fn)
    kept = Fp8Weight(values=values, scale=torch.ones(4), rounds_inputs=False)
    rounds = Fp8Weight(values=values, scale=torch.ones(4))
    assert isinstance(stack([kept, kept], torch.float32), Fp8Weight)
    assert isinstance(stack([kept, rounds], torch.float32), PartedWeight)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nf4", {"weight.absmax": None}, r"q_proj\.weight\.absmax of shape .* is missing"),
        ("nf4", {"weight.absmax": torch.ones(3)}, r"q_proj\.weight\.absmax has shape \[3\]"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": None}, r"bitsandbytes__nf4 is missing.*save"),
        (
            "nf4",
            {"weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"{"), dtype=torch.uint8)},
            r"q_proj\.weight\.quant_state\.bitsandbytes__nf4 is not the JSON",
        ),
        ("nf4", {"weight": torch.zeros(7, 1, dtype=torch.uint8)}, r"q_proj\.weight holds 7 of torch.uint8"),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, r"weight_global_scale is \[0.0\]; one number"),
        ("nvfp4", {"weight_scale": torch.ones(64, 4)}, r"q_proj\.weight_scale is stored in torch.float32"),
        ("nvfp4", {"weight_packed": torch.zeros(64, 8, dtype=torch.uint8)}, r"weight_packed has shape"),
        ("mxfp4", {"weight_packed": torch.zeros(64, 8, dtype=torch.uint8)}, r"weight_packed has shape"),
        (
            "mxfp4",
            {"weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)},
            r"q_proj\.weight_scale holds a scale that is no number",
        ),
    ],
)
def test_damaged_checkpoints_are_named(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings, writer, _, sizes = CASES[name]
    oracle = make_checkpoint(tmp_path, "llama", **sizes)
    rewrite(tmp_path, oracle, settings, writer)
    tensors = load_file(tmp_path / "model.safetensors")
    for part, value in change.items():
        key = f"model.layers.0.self_attn.q_proj.{part}"
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        open_runner(tmp_path, native="required")


def _patched(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def test_hostile_gguf_files_name_their_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    name = "blk.0.attn_q.weight"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor(name, np.zeros((4, 210), np.uint8), raw_dtype=Kind.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = path.read_bytes()
    assert open_gguf(path).tensors[0].name == name
    _patched(path, lambda content: content[:-100])
    with pytest.raises(ConfigError, match=rf"tensor {name} is cut short"):
        open_gguf(path)
    at = whole.index(name.encode()) + len(name) + 4
    _patched(path, lambda _: whole[:at] + (96).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(ConfigError, match=rf"tensor {name} has rows of 96 numbers, and Q6_K has blocks"):
        open_gguf(path)
    at += 16
    _patched(path, lambda _: whole[:at] + (250).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ConfigError, match=rf"tensor {name} has the type 250, which is not known"):
        open_gguf(path)


@pytest.mark.parametrize("kind", [Kind.Q6_K, Kind.Q8_0])
def test_a_head_that_is_the_embedding_keeps_its_codes(kind: Kind, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE, tie_word_embeddings=True)
    path = tmp_path / "model.gguf"
    write(path, oracle, "llama", {"token_embd": kind, "": Kind.Q4_K})
    assert_equals(path, oracle, tolerance=2 * ROUNDED, native="required")
    runner = open_runner(path, native="required", dtype="bfloat16")
    head = runner.model.model.head.weight
    runner.close()
    assert head.struct.format == (CODED + 6 if kind is Kind.Q6_K else INT8_GROUPED)
    config = EngineConfig(dtype="bfloat16")
    given = plan_input(config, ModelConfig(path=str(path)), device="cpu", available_bytes=8 << 30)
    # The plan does not know how many outputs are there to fill the last vector of 16.
    assert given.weights.tied_head_bytes == pytest.approx(sum(head.sizes.values()), rel=16 / 199)


def test_the_plan_says_which_form_has_how_many_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    kinds = {"token_embd": Kind.F16, "ffn_down": Kind.Q6_K, "": Kind.Q4_K}
    write(tmp_path / "model.gguf", oracle, "llama", kinds)
    file = tmp_path / "millrace.toml"
    file.write_text(f'[model]\npath = "{tmp_path / "model.gguf"}"\n[engine]\ndtype = "bfloat16"\n')
    assert plan_command.main(["--config", str(file), "--json"]) == 0
    forms = {form["form"]: form["bits"] for form in json.loads(capsys.readouterr().out)["weight_forms"]}
    assert forms == {"Q4_K": 4.75, "Q6_K": 6.62, "dense": 0}
    assert plan_command.main(["--config", str(file)]) == 0
    printed = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert "Q4_K in 4.75 bits" in printed


def test_parts_come_from_the_loader_and_are_kept(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    path, prompt = tmp_path / "model.gguf", prompt_of(20, 199)
    write(path, oracle, "llama", {"token_embd": Kind.F16} | MIXED["Q4_K_M"])
    kept = KeptWeights(PackedWeightsConfig(path=str(tmp_path / "kept"), min_bytes=0))
    outputs = []
    for load in (load_here, kept.load, kept.load):
        with closing(open_runner(path, native="required", build=partial(build_here, load=load))) as runner:
            parts = runner.model.model.layers[0].attention.qkv.packed_parts
            assert [part.struct.format for part in parts] == [CODED + 4, CODED + 6]
            (job,) = Driver(runner).run([Job(prompt)])
        outputs.append(job.output)
        if (writing := kept.write_later()) is not None:
            writing.join()
    assert len(list((tmp_path / "kept").glob("*.packed"))) == 1
    assert outputs[0] == outputs[1] == outputs[2]
