"""Layers whose keys and values differ in type: each is held, planned, moved and found again as its own."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.plan import make_plan, plan_input, window_room_of
from engine.model.plan_command import main as print_plan
from engine.runner.build import build_here
from engine.runner.prefix_disk.build import fingerprint
from engine.runner.runner import ModelRunner
from kernels.paged_cache.host import KEY_GROUP
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_plan import BUNDLED, GIB, LATENT_SIZES, gemma3_shaped, given
from tests.unit.engine.quantization.test_kv import COSTS, mean_difference, scored
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.engine.runner.test_window import generate

GEMMA4: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 0,
}
SHARED = {"num_hidden_layers": 4, "layer_types": 2 * GEMMA4["layer_types"], "num_kv_shared_layers": 2}
MIXED: dict[str, Any] = {"kv_dtype": "fp8", "kv_dtype_layers": {"0": "int8"}}
FOUR: dict[str, Any] = {"kv_dtype": "kivi4", "block_size": KEY_GROUP}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    make_checkpoint(place, "llama", head_dim=16)
    return place


def written(folder: Path, cache: dict[str, Any], native: str) -> list[list[bytes]]:
    """Of both layers the bytes of all blocks, some of which a prompt has written."""
    with closing(open_runner(folder, native=native, cache=cache, kv_cache_bytes=1 << 19)) as runner:
        layers = [[np.asarray(part) for part in layer.tensors()] for layer in runner.storage.layers]
        for layer in layers:
            for part in layer:
                part[:] = 0
        prefix = (list(range(4)), 0)
        Driver(runner).run([Job(prompt_of(40, 199), num_tokens=1)], prefix=prefix)
        return [[part[:4].tobytes() for part in layer] for layer in layers]


@pytest.mark.parametrize("native", ["required", "off"])
def test_each_layer_keeps_its_own_type(folder: Path, native: str) -> None:
    """What a layer writes depends on those before it, and on its own type."""
    integers, floats, mixed, other, named = (
        written(folder, cache, native)
        for cache in (
            {"kv_dtype": "int8"},
            {"kv_dtype": "fp8"},
            MIXED,
            {"kv_dtype": "fp8", "kv_dtype_layers": {"1": "auto"}},
            {"kv_dtype": "int8", "kv_dtype_layers": {"0-1": "fp8"}},
        )
    )
    assert named == floats
    assert (mixed[0], other[0]) == (integers[0], floats[0])
    # Behind other keys they are others.
    assert list(map(len, mixed[1])) == list(map(len, floats[1]))
    assert mixed[1] != floats[1]
    assert len(other[1][0]) == 4 * len(floats[1][0])


def test_native_kernels_read_what_torch_reads(folder: Path) -> None:
    prompt = prompt_of(60, 199)
    ours, theirs = (scored(folder, native, prompt, MIXED) for native in ("required", "off"))
    assert mean_difference(ours, theirs) < COSTS["fp8"] / 5
    assert mean_difference(ours, scored(folder, "required", prompt, {"kv_dtype": "fp8"})) > 0


@pytest.mark.parametrize("native", ["required", "off"])
@pytest.mark.parametrize("form", [{"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, MIXED])
def test_preempted_answers_come_back_from_the_host(folder: Path, form: dict[str, Any], native: str) -> None:
    def answered(num_blocks: int, host_blocks: int) -> tuple[dict[tuple[int, int], list[int]], int]:
        cache = form | {"host_bytes": host_blocks * per_block}
        with closing(
            open_runner(folder, native=native, cache=cache, kv_cache_bytes=num_blocks * per_block)
        ) as runner:
            assert runner.storage.num_blocks == num_blocks
            tokens, preemptions, _ = generate(
                runner, window=None, prefix_caching=host_blocks > 0, num_host_blocks=host_blocks
            )
        return tokens, preemptions.total()

    config = EngineConfig(cache=CacheConfig(**form), dtype="float32")
    asked = plan_input(config, ModelConfig(path=str(folder)), device="cpu", available_bytes=GIB)
    per_block = 16 * make_plan(asked).kv_bytes_per_token
    expected, none = answered(100, 0)
    found, some = answered(17, 20)
    assert found == expected
    assert none == 0 < some


def test_a_plan_counts_each_layer_and_says_what_they_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = {"0-1": "int8", "4": "auto"}
    plan = make_plan(given(EngineConfig(cache=CacheConfig(**FOUR, kv_dtype_layers=layers))))  # type: ignore[arg-type]
    spec = given().spec
    shares = {
        "int8": (kv_bytes_per_token(spec, "int8", (0, 1)), "0-1"),
        "kivi4": (kv_bytes_per_token(spec, "kivi4", (2, 3, 5)), "2-3, 5"),
        "float32": (kv_bytes_per_token(spec, "float32", (4,)), "4"),
    }
    assert plan.kv_bytes_per_token == sum(taken for taken, _ in shares.values())
    path = tmp_path / "config.toml"
    path.write_text(
        f'[model]\npath = "{BUNDLED.path}"\n[engine]\ndevice = "cpu"\n[engine.cache]\nkv_dtype = "kivi4"\n'
        "block_size = 64\n"
        'kv_dtype_layers = {"0-1" = "int8", "4" = "auto"}\n'
    )
    assert print_plan(["--config", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["kv_shares"]
    assert {each["kv_dtype"]: (each["bytes_per_token"], each["layers"]) for each in said} == shares
    assert print_plan(["--config", str(path)]) == 0
    table = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "int8 in layers 0-1" in table
    assert "B kivi4 in layers 2-3, 5" in table


def test_window_blocks_take_what_their_layers_do(tmp_path: Path) -> None:
    """29 of 34 layers have a window; the sixth has none."""
    plain = gemma3_shaped(tmp_path)
    cache = msgspec.structs.replace(plain.config.cache, kv_dtype_layers={"0-5": "int8"})
    config = msgspec.structs.replace(plain.config, cache=cache)
    room = window_room_of(msgspec.structs.replace(plain, config=config))
    eight, sixteen = (kv_bytes_per_token(plain.spec, each, (0,)) for each in ("int8", "bfloat16"))
    assert room.bytes_per_token == 5 * eight + 24 * sixteen


def test_only_engines_of_the_same_choice_exchange_blocks() -> None:
    """Whichever way it is written: blocks of as many bytes may be others."""

    def built(cache: dict[str, Any]) -> bytes:
        config = EngineConfig(dtype="bfloat16", cache=CacheConfig(kv_cache_bytes=8 << 20, **cache))
        runner, memory, facts = build_here(config, BUNDLED, lambda phase, part: None)
        assert isinstance(runner, ModelRunner)
        runner.close()
        return fingerprint(config, BUNDLED, memory, facts, lambda path: b"")

    first = built(MIXED | {"kv_dtype_layers": {"0-1": "int8"}})
    assert built(MIXED | {"kv_dtype_layers": {"1": "int8", "0": "int8"}}) == first
    assert built({"kv_dtype": "int8", "kv_dtype_layers": {"2-5": "fp8"}}) == first
    assert built(MIXED | {"kv_dtype_layers": {"0": "int8", "2": "int8"}}) != first
    assert built(MIXED) != first


@pytest.mark.parametrize(
    ("case", "cache", "words"),
    [
        ("llama", {"2": "int8"}, r"'2': the model has layers 0 to 1; name some of these"),
        ("llama", {"0-999999": "int8"}, r"'0-999999': the model has layers 0 to 1"),
        ("llama", {"0-1": "int8", "1": "auto"}, r"'0-1' and '1' both name layer 1; leave it to one of them"),
        ("llama", {"first": "int8"}, r"'first' is no layer; write one as \"29\", and several as \"0-1\""),
        ("llama", {"1-0": "int8"}, r"'1-0' is no layer"),
        (
            "odd",
            {"1": "kivi4"},
            r"'1' = 'kivi4' does not go with Llama.*, whose heads of 20 .*; set it to",
        ),
        ("latent", {"0": "kivi4"}, r"'0' = 'kivi4' does not go with Deepseek.*, whose latent vectors"),
        ("state", {"0-1": "int8"}, r"'0-1': layer 0 of Lfm2\w+ keeps no keys and values; leave it out"),
        (
            "shared",
            {"3": "int8"},
            r"'3': layer 3 of Gemma4\w+ reads the keys and values of layer 1; name that one",
        ),
    ],
)
def test_what_a_layer_cannot_have_is_refused_by_name(
    case: str, cache: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model_type, changes = {
        "llama": ("llama", {}),
        "odd": ("llama", {"head_dim": 20}),
        "latent": ("deepseek_v3", LATENT_SIZES),
        "state": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
        "shared": ("gemma4_text", GEMMA4 | SHARED),
    }[case]
    make_checkpoint(tmp_path, model_type, **changes)
    config = EngineConfig(cache=CacheConfig(kv_dtype_layers=cache))
    asked = plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 * GIB)
    with pytest.raises(ConfigError, match=rf"engine\.cache\.kv_dtype_layers: {words}"):
        make_plan(asked)


def test_layers_of_their_own_type_need_not_hold_the_others(tmp_path: Path) -> None:
    """Heads of 32 take four bits, those of 24 do not: nobody asks the layer that has eight."""
    make_checkpoint(tmp_path, "gemma4_text", **GEMMA4 | {"head_dim": 32, "global_head_dim": 24})
    model = ModelConfig(path=str(tmp_path))
    for layers, fits in (({}, False), ({"0": "int8"}, False), ({"1": "int8"}, True)):
        config = EngineConfig(cache=CacheConfig(**FOUR, kv_dtype_layers=layers))
        asked = plan_input(config, model, device="cpu", available_bytes=8 * GIB)
        if fits:
            assert make_plan(asked).num_blocks > 0
        else:
            with pytest.raises(ConfigError, match=r"kv_dtype = 'kivi4' .* heads of 24 elements"):
                make_plan(asked)
