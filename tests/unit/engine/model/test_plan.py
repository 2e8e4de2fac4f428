"""The memory plan: its sums, its defaults, its refusals, and that what is allocated is what was planned."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig, QuantizationConfig, SchedulerConfig
from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.native_decoder import NativeDecoder
from engine.model.plan import (
    CPU_CACHE_LIMIT_BYTES,
    PlanInput,
    choose_dtype,
    make_plan,
    plan_input,
)
from engine.model.plan_command import AskedLoad, decoding_blocks
from engine.model.plan_command import main as print_plan
from engine.model.weight_memory import WeightCount
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from kernels.linear.formats import DenseWeight
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.quantization.writers import stored_bytes

# Latent attention's, of a small model.
LATENT_SIZES = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
BUNDLED = ModelConfig(path="models/millrace-nano")
GIB = 1 << 30


def given(config: EngineConfig | None = None, *, available: int = 8 * GIB, device: str = "cpu") -> PlanInput:
    return plan_input(config or EngineConfig(), BUNDLED, device=device, available_bytes=available)


def test_parts_fit_into_the_total() -> None:
    plan = make_plan(given())
    parts = (plan.weights_bytes, plan.workspace_bytes, plan.headroom_bytes, plan.kv_cache_bytes)
    assert all(part > 0 for part in parts)
    assert sum(parts) <= plan.total_bytes
    assert plan.kv_cache_bytes == plan.num_blocks * plan.block_size * plan.kv_bytes_per_token
    assert plan.capacity_tokens >= plan.max_model_len


def test_default_on_a_cpu_is_modest_and_on_an_accelerator_is_not() -> None:
    assert make_plan(given(available=64 * GIB)).kv_cache_bytes <= CPU_CACHE_LIMIT_BYTES
    assert make_plan(given(available=GIB)).kv_cache_bytes <= GIB // 4
    assert make_plan(given(available=64 * GIB, device="cuda")).kv_cache_bytes > 40 * GIB


@pytest.mark.parametrize(
    ("streams", "prompt", "output", "at_once", "said"),
    [
        (4, 100, 28, 4, "fit: they hold 32 of 64 blocks"),
        # The last token of an answer needs a block of its own.
        (4, 100, 29, 4, "fit: they hold 36 of 64 blocks"),
        (20, 100, 28, 8, "do not fit at once: they need 160 of 64 blocks; 8 run together"),
        (12, 16, 16, 10, "do not run at once: engine.scheduler.max_num_seqs is 10"),
        (1, 500, 13, 0, "do not fit: 513 tokens are more than max_model_len 512"),
    ],
)
def test_a_load_that_is_asked_for_fits_or_does_not(
    streams: int, prompt: int, output: int, at_once: int, said: str
) -> None:
    per_block = make_plan(given()).kv_bytes_per_token * 16
    config = EngineConfig(
        max_model_len=512,
        cache=CacheConfig(kv_cache_bytes=64 * per_block, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=10),
    )
    asked = given(config)
    placed = AskedLoad(streams, prompt, output).placed(asked, make_plan(asked))
    assert (placed.streams_at_once, placed.fits) == (at_once, at_once == streams)
    assert said in placed.sentence


def test_half_a_load_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        print_plan(["--streams=3"])
    assert refused.value.code == 2
    assert "--streams, --prompt and --output go together" in capsys.readouterr().err


def test_sequences_behind_a_window_hold_what_the_plan_says(tmp_path: Path) -> None:
    config = EngineConfig(max_model_len=512, cache=CacheConfig(kv_cache_bytes=16 << 20))
    make_checkpoint(tmp_path, "mistral", max_position_embeddings=512)
    for window, expected in ((128, 128 // 16 + 2), (1000, 32), (None, 32)):
        edit_config(tmp_path, sliding_window=window)
        asked = plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 * GIB)
        assert decoding_blocks(asked, make_plan(asked)) == expected, window


def test_four_bits_take_a_quarter_and_what_they_stand_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", head_dim=64)
    spec = read_spec(tmp_path)
    elements = sum(shape.elements for shape in spec.cache_shapes)
    # A scale of the value; of a block of 64 a middle and half a step of each channel.
    others = sum(shape.num_heads * (4 + 64 * 4 // 64) for shape in spec.cache_shapes)
    assert kv_bytes_per_token(spec, "kivi4") == elements // 2 + others
    assert kv_bytes_per_token(spec, "bfloat16") > 3.5 * kv_bytes_per_token(spec, "kivi4")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("deepseek", "'kivi4' does not go with DeepseekV3ForCausalLM, whose latent vectors"),
        (
            "odd heads",
            "'kivi4' does not go with LlamaForCausalLM, whose heads of 24 elements are no multiple of 16",
        ),
    ],
)
def test_what_four_bits_cannot_hold_is_refused_by_name(family: str, words: str, tmp_path: Path) -> None:
    if family == "deepseek":
        make_checkpoint(tmp_path, "deepseek_v3", **LATENT_SIZES)
    else:
        make_checkpoint(tmp_path, "llama", head_dim=24)
    config = EngineConfig(cache=CacheConfig(kv_dtype="kivi4"))
    asked = plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 * GIB)
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        make_plan(asked)
    assert "set it to int8, fp8 or auto" in str(refused.value)


def test_forgotten_keys_are_planned_where_they_lie() -> None:
    """On a CPU beside keys and values, else in the host's memory."""
    config = EngineConfig(cache=CacheConfig(forgotten_bytes=7 * GIB))
    with pytest.raises(ConfigError, match=r"forgotten keys 7\.0 GiB \(engine\.cache\.forgotten_bytes\)"):
        make_plan(given(config))
    plan = make_plan(given(config, device="cuda"))
    assert plan.kv_cache_bytes == make_plan(given(device="cuda")).kv_cache_bytes
    assert plan.forgotten_bytes == 7 * GIB
    least = plan.forgotten_block_bytes
    for device in ("cpu", "cuda"):
        config = EngineConfig(cache=CacheConfig(forgotten_bytes=least - 1))
        with pytest.raises(
            ConfigError, match=rf"forgotten_bytes = {least - 1}: .* 16 .* take {least}, the least"
        ):
            make_plan(given(config, device=device))
        make_plan(given(EngineConfig(cache=CacheConfig(forgotten_bytes=least)), device=device))


def test_configured_size_is_taken() -> None:
    config = EngineConfig(cache=CacheConfig(kv_cache_bytes=100 << 20))
    plan = make_plan(given(config))
    assert 0 <= (100 << 20) - plan.kv_cache_bytes < plan.block_size * plan.kv_bytes_per_token


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_what_is_allocated_is_what_was_planned(kv_dtype: str) -> None:
    config = EngineConfig(cache=CacheConfig(kv_cache_bytes=64 << 20, kv_dtype=kv_dtype))
    runner, plan, facts = build_here(config, BUNDLED, lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    with closing(runner):
        tensors = [tensor for layer in runner.storage.layers for tensor in layer.tensors()]
        allocated = sum(tensor[:-1].nbytes for tensor in tensors)
        assert allocated == plan.kv_cache_bytes
        assert facts.vocab_size == runner.model.spec.vocab_size
        assert facts.num_layers == len(runner.storage.layers)


@pytest.mark.parametrize(
    ("quantize", "head"),
    [("off", "int8"), ("int8", "int8"), ("int8", "dense"), ("w8a8", "int8"), ("int4", "dense")],
)
def test_weights_take_what_was_planned(quantize: str, head: str) -> None:
    config = EngineConfig(
        dtype="bfloat16",
        native="off",
        quantize=quantize,
        quantization=QuantizationConfig(head=head, group_size=32),
    )
    runner, plan, _ = build_here(config, BUNDLED, lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    with closing(runner):
        model = runner.model
        loaded = sum(stored_bytes(linear.weight) for layer in model.layers for linear in layer.linears())
        loaded += model.embedding.nbytes
        if not isinstance(model.head.weight, DenseWeight):
            loaded += stored_bytes(model.head.weight)
        loaded += sum(part.nbytes for rope in model.ropes for part in rope)
    assert isinstance(model.head.weight, DenseWeight) == (quantize == "off" or head == "dense")
    assert loaded == pytest.approx(plan.weights_bytes, rel=0.01)


@pytest.mark.parametrize("quantize", ["off", "int8", "w8a8", "int4"])
def test_packed_weights_take_what_was_planned(quantize: str) -> None:
    config = EngineConfig(
        dtype="bfloat16", quantize=quantize, quantization=QuantizationConfig(head="int8", group_size=32)
    )
    runner, plan, _ = build_here(config, BUNDLED, lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    runner.close()
    if not isinstance(runner.model, NativeDecoder):
        pytest.skip("no native kernels here")
    # Sizes that are no multiple of a panel are padded with zeros.
    model = runner.model.model
    tables = sum(part.nbytes for rope in model.ropes for part in rope)
    taken = model.head.packed.arena.num_bytes() + model.embedding.nbytes + tables
    assert taken == pytest.approx(plan.weights_bytes, rel=0.03)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "version": "gemm"})
    with pytest.raises(ConfigError, match=r"engine\.quantize = 'int8'.*already \(awq\); set it to off"):
        plan_input(
            EngineConfig(quantize="int8"), ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=GIB
        )


def test_impossible_plans_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4096 needs 24\.0 MiB.*lower engine\.max_model_len"):
        make_plan(given(EngineConfig(cache=CacheConfig(kv_cache_bytes=1 << 20))))
    with pytest.raises(ConfigError, match=r"kv_cache_bytes = \d+ \(8\.0 GiB\) is more than the .*; lower it"):
        make_plan(given(EngineConfig(cache=CacheConfig(kv_cache_bytes=8 * GIB))))
    with pytest.raises(ConfigError, match=r"60\.0 MiB available"):
        make_plan(given(available=60 << 20))
    with pytest.raises(ConfigError, match=r"max_model_len = 9999 exceeds the 4096 positions"):
        make_plan(given(EngineConfig(max_model_len=9999)))
    with pytest.raises(ConfigError, match=r"block_size = 24.*power of two"):
        make_plan(given(EngineConfig(cache=CacheConfig(block_size=24))))


def test_serving_type_follows_device_and_size() -> None:
    spec = given().spec
    assert choose_dtype(EngineConfig(), spec, "cuda", 10**6) == "bfloat16"
    assert choose_dtype(EngineConfig(), spec, "cpu", 10**6) == "float32"
    assert choose_dtype(EngineConfig(), spec, "cpu", 10**10) == "bfloat16"
    assert choose_dtype(EngineConfig(dtype="bfloat16"), spec, "cpu", 10**6) == "bfloat16"


def test_larger_steps_need_more_workspace() -> None:
    small, large = (
        make_plan(
            given(EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=tokens)))
        ).workspace_bytes
        for tokens in (256, 4096)
    )
    assert large > 4 * small


def test_command_prints_the_plan_and_names_what_is_wrong(tmp_path: Path) -> None:
    def run(text: str, *flags: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "config.toml"
        path.write_text(text)
        command = [sys.executable, "-m", "engine.model.plan_command", "--config", str(path), *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    found = run('[model]\npath = "models/millrace-nano"\n[engine]\ndevice = "cpu"\n', "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["max_model_len"] == 4096
    table = run("[engine]\nmax_model_len = 1024\n")
    assert "KV cache" in table.stdout
    assert "of 1024" in " ".join(table.stdout.split())
    wrong = run("[engine]\nmax_modellen = 3\n")
    assert wrong.returncode == 2
    assert "max_modellen" in wrong.stderr
    nowhere = run('[model]\npath = "/nowhere/at/all"\n')
    assert nowhere.returncode == 2
    assert "/nowhere/at/all" in nowhere.stderr


def gemma3_shaped(folder: Path) -> PlanInput:
    """The layers of Gemma 3 4B without weights: 29 of 34 look back on 1,024 tokens. A cache of 4 GiB."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineConfig(
        dtype="bfloat16", max_model_len=8000, cache=CacheConfig(kv_cache_bytes=4 * GIB, block_size=16)
    )
    return PlanInput(
        spec=read_spec(folder),
        device="cpu",
        available_bytes=64 * GIB,
        weights=WeightCount(),
        config=options,
    )


@pytest.mark.parametrize(
    ("prompt", "output", "least"),
    # As many as before, and far more where most of the context lies behind windows.
    [(200, 50, 0.95), (900, 90, 0.95), (2000, 48, 1.2), (7000, 1000, 2.5)],
)
def test_streams_of_any_length_find_room_where_only_some_layers_slide(
    prompt: int, output: int, least: float, tmp_path: Path
) -> None:
    after = gemma3_shaped(tmp_path)
    scheduler = SchedulerConfig(max_num_seqs=128)
    after = msgspec.structs.replace(after, config=msgspec.structs.replace(after.config, scheduler=scheduler))
    # What keeps whole blocks keeps all layers' blocks.
    cache = msgspec.structs.replace(after.config.cache, host_bytes=1)
    before = msgspec.structs.replace(after, config=msgspec.structs.replace(after.config, cache=cache))
    asked, counts = AskedLoad(streams=128, prompt=prompt, output=output), []
    for given_input in (before, after):
        plan = make_plan(given_input)
        assert plan.kv_cache_bytes <= 4 * GIB
        counts.append(asked.placed(given_input, plan).streams_at_once)
    print(f"\nstreams of {prompt + output} tokens in 4 GiB: {counts[0]} before, {counts[1]} after")
    assert 0 < counts[0] < 128
    assert counts[1] >= least * counts[0]
