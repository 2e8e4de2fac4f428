"""The native back end against the torch one: the same tokens in float32, near logits in bfloat16."""

from __future__ import annotations

import logging
from contextlib import closing
from ctypes import c_int64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, SchedulerConfig
from engine.model.back_end import load_model
from engine.model.checkpoint import LoadRequest
from engine.model.families import read_spec
from engine.model.native_decoder import NativeDecoder
from engine.model.program_builder import ProgramBuilder
from engine.runner.runner import ModelRunner
from engine.types import SamplingParams, SchedulerOutput
from kernels.linear.native import NativeProduct
from kernels.native.build import machine_levels
from kernels.native.library import NativeUnavailableError, Program, StepStruct, load_level, load_native
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES, DEEPSEEK, YARN
from tests.unit.engine.runner.driver import Driver, Job, generated, open_runner, prompt_of

BUNDLED = Path("models/millrace-nano")
GREEDY = SamplingParams(temperature=0.0, logprobs=5)
# Largest difference of a log-probability that rounding to bfloat16 may make in these shallow models.
BFLOAT16_TOLERANCE = 0.08
# Where it makes a token choose another expert, with these few and large ones.
ROUTED_TOLERANCE = 0.5

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)


def generate(runner: ModelRunner, vocab_size: int, *, num_tokens: int = 24) -> list[Job]:
    """Greedy outputs of prompts of many lengths, together and in chunks."""
    jobs = [
        Job(prompt_of(length, vocab_size, seed=length), num_tokens=num_tokens, sampling=GREEDY, chunk=29)
        for length in (1, 5, 40, 100, 3)
    ]
    with closing(runner):
        done = Driver(runner).run(jobs)
    # Jobs that all failed would be equal, too.
    assert [len(job.output) for job in done] == [num_tokens] * len(done), [job.failure for job in done]
    return done


# Wide latents, with two layers where a family has more.
WIDE = {"kv_lora_rank": 40, "num_hidden_layers": 2}
DENSE = DEEPSEEK | WIDE | {"first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2}
# Name to a model type of tests/unit/engine/checkpoints and changes to its configuration.
LOWERED: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (CASES[name][0], CASES[name][1] | {"num_hidden_layers": 2})
        for name in (
            *("llama", "qwen2", "qwen3", "mistral-window", "phi3", "gemma2", "gemma3", "olmo2"),
            *(
                "mixtral-window",
                "mixtral",
                "qwen3-moe",
                "gpt-oss",
                "qwen2-moe",
                "llama4",
                "granite-moe-shared",
            ),
            *("cohere-norms", "hunyuan", "apertus", "gpt-neox", "phi", "ministral3", "nemotron"),
        )
    },
    "gpt2": CASES["gpt2"],
    **{
        name: CASES[name]
        for name in (*("lfm2", "qwen3-next", "granite-4", "nemotron-h-latent", "falcon-h1-norm"),)
    },
    **{name: CASES[name] for name in ("afmoe", "laguna", "lfm3", "mimo-v2")},
    "recurrent-gemma": (CASES["recurrent-gemma"][0], CASES["recurrent-gemma"][1] | {"lru_width": 60}),
    **{name: (CASES[name][0], CASES[name][1] | WIDE) for name in ("deepseek-v2-groups", "deepseek-v3")},
    # Latent attention in dense layers: queries with and without a rank of their own.
    "latent": ("deepseek_v3", DENSE),
    "latent-yarn": (
        "deepseek_v2",
        DENSE | {"q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
}


@pytest.mark.parametrize("family", LOWERED)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_family_gives_the_tokens_of_torch(family: str, num_threads: int, tmp_path: Path) -> None:
    model_type, changes = LOWERED[family]
    make_checkpoint(tmp_path, model_type, **changes)
    native = open_runner(tmp_path, native="required", num_threads=num_threads)
    assert isinstance(native.model, NativeDecoder)
    ours = generate(native, 199)
    theirs = generate(open_runner(tmp_path, native="off"), 199)
    assert [job.output for job in ours] == [job.output for job in theirs]
    for job, other in zip(ours, theirs, strict=True):
        assert_near(job, other, 1e-4)


@pytest.mark.parametrize("family", LOWERED)
def test_bfloat16_is_near_float32(family: str, tmp_path: Path) -> None:
    model_type, changes = LOWERED[family]
    make_checkpoint(tmp_path, model_type, **changes)
    ours = generate(open_runner(tmp_path, native="required", dtype="bfloat16"), 199, num_tokens=1)
    theirs = generate(open_runner(tmp_path, native="off"), 199, num_tokens=1)
    for job, other in zip(ours, theirs, strict=True):
        assert_near(job, other, ROUTED_TOLERANCE if "num_experts_per_tok" in changes else BFLOAT16_TOLERANCE)


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "deepseek-v3", "gpt-oss", "llama4", "qwen2-moe", "phi"),
        *("lfm2", "qwen3-next", "granite-4", "nemotron-h-latent", "falcon-h1-norm", "recurrent-gemma"),
        *("laguna", "lfm3", "mimo-v2"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_and_latents_do_not_depend_on_the_batch(family: str, dtype: str, tmp_path: Path) -> None:
    """Bit for bit: each prompt alone and whole gives what it gave in chunks among others."""
    model_type, changes = LOWERED[family]
    make_checkpoint(tmp_path, model_type, **changes)
    together = generate(open_runner(tmp_path, native="required", dtype=dtype, num_threads=2), 199)
    alone = open_runner(tmp_path, native="required", dtype=dtype)
    for job in together:
        (single,) = Driver(alone).run([Job(job.prompt, num_tokens=24, sampling=GREEDY)])
        assert single.output == job.output
        assert [entry.logprob for entry in single.logprobs] == [entry.logprob for entry in job.logprobs]
    alone.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_bundled_model(kv_dtype: str) -> None:
    """Token for token over long outputs; with an int8 cache the rounding differs in the last bit only."""
    cache = {"kv_dtype": kv_dtype}
    ours = generate(open_runner(BUNDLED, native="required", cache=cache), 2048, num_tokens=64)
    theirs = generate(open_runner(BUNDLED, native="off", cache=cache), 2048, num_tokens=64)
    assert [job.output for job in ours] == [job.output for job in theirs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", LOWERED)
def test_packed_weights_leave_nothing_of_the_file_in_memory(tmp_path: Path, family: str, dtype: str) -> None:
    model_type, changes = LOWERED[family]
    make_checkpoint(tmp_path, model_type, **changes)
    with closing(open_runner(tmp_path, native="required", dtype=dtype)) as runner:
        assert isinstance(runner.model, NativeDecoder)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def assert_near(ours: Job, theirs: Job, tolerance: float) -> None:
    """The log-probabilities of tokens that both report."""
    for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)


def test_prompts_longer_than_the_program_was_made_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    small = open_runner(tmp_path, native="required", scheduler=SchedulerConfig(max_num_batched_tokens=64))
    assert isinstance(small.model, NativeDecoder)
    job, other = (
        Driver(runner).run([Job(prompt_of(200, 199), num_tokens=3, sampling=GREEDY)])[0]
        for runner in (small, open_runner(tmp_path, native="off"))
    )
    assert job.output == other.output
    small.close()


def test_required_and_impossible(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"engine\.native = 'required', but engine\.attention_backend"):
        open_runner(tmp_path, native="required", attention_backend="reference")


def test_fp8_is_refused_where_nothing_computes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama")
    for native in ("auto", "required"):
        with pytest.raises(ConfigError, match=r"engine\.quantize = 'fp8'.* int8, w8a8 or int4"):
            open_runner(tmp_path, native=native, quantize="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    request = LoadRequest(
        folder=tmp_path,
        spec=read_spec(tmp_path),
        dtype="bfloat16",
        max_model_len=96,
        config=EngineConfig(quantize="fp8"),
    )
    with pytest.raises(ConfigError, match=r"NVIDIA A100 has compute capability 8\.0.* 8\.9"):
        load_model(request, device="cuda", library=None, progress=lambda phase, part: None)


def test_what_cannot_be_lowered_is_served_by_torch_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")

    def unavailable() -> None:
        raise NativeUnavailableError("no C++ compiler (g++ or clang++) is installed")

    monkeypatch.setattr("engine.model.back_end.load_native", unavailable)
    with caplog.at_level(logging.WARNING):
        runner = open_runner(tmp_path)
    assert not isinstance(runner.model, NativeDecoder)
    assert "torch serves LlamaForCausalLM: no C++ compiler" in caplog.text
    runner.close()


def test_off_uses_no_native_code_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for draws and log-probabilities either; elsewhere they are native even where torch computes."""
    make_checkpoint(tmp_path, "llama")
    calls: list[str] = []
    run = Program.run

    def counted(program: Program, pool: int) -> None:
        calls.extend(op.name for op in program.ops)
        run(program, pool)

    monkeypatch.setattr(Program, "run", counted)
    jobs = {}
    for native in ("off", "auto"):
        runner = open_runner(tmp_path, native=native, attention_backend="reference")
        sampling = SamplingParams(logprobs=2, prompt_logprobs=2, seed=4)
        (jobs[native],) = Driver(runner).run([Job(prompt_of(20, 199), num_tokens=6, sampling=sampling)])
        runner.close()
        assert set(calls) == (set() if native == "off" else {"sample", "logprobs"})
    assert jobs["off"].output == jobs["auto"].output


def test_a_step_that_memory_ends_for_leaves_the_program_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the size before go on in their buffers; a larger one gets its own when memory is back."""
    make_checkpoint(tmp_path, "llama")
    # With four drafts each, 20 rows of logits.
    limits = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4)
    runner = open_runner(tmp_path, native="required", scheduler=limits)
    model = runner.model
    assert isinstance(model, NativeDecoder)

    def outputs(length: int, count: int) -> list[list[int]]:
        jobs = [Job(prompt_of(length, 199, seed=seed), num_tokens=4) for seed in range(count)]
        return [job.output for job in Driver(runner).run(jobs)]

    def no_memory(*_: object) -> None:
        raise MemoryError

    few = outputs(3, 10)
    with monkeypatch.context() as patched:
        # As many as there may be have had their place since the start.
        patched.setattr("engine.model.native_decoder.make_workspace", no_memory)
        many = outputs(3, 20)
    for builder, length, count in (("native_decoder", 1, 60), ("program_builder", 90, 1)):
        with monkeypatch.context() as patched:
            patched.setattr(f"engine.model.{builder}.make_workspace", no_memory)
            with pytest.raises(MemoryError):
                outputs(length, count)
        known = tuple(runner.table.states)
        runner.launch(SchedulerOutput(0, (), (), known)).wait()
        assert (outputs(3, 10), outputs(3, 20)) == (few, many)
        assert [len(each) for each in outputs(length, count)] == [4] * count
    runner.close()


def test_the_workspace_holds_the_rows_of_narrow_products(tmp_path: Path) -> None:
    """Of 256 inputs at most 64 rows are converted by every thread for itself, of 64 inputs 256 rows."""
    make_checkpoint(tmp_path, "llama", hidden_size=64, intermediate_size=448)
    runner = open_runner(tmp_path, native="required")
    assert isinstance(runner.model, NativeDecoder)
    library, model = runner.model.library, runner.model.model
    needed = library.function("millrace_gemm_workspace", c_int64, (c_int64,) * 3)
    builder = ProgramBuilder(model, library, StepStruct(), 256, 64)
    for width in (64, 448):
        assert builder.workspace.size >= needed(256, width, 64)
    runner.close()


def test_hidden_states_of_padding_are_not_computed(tmp_path: Path) -> None:
    """The runner pads steps to 16 rows; the program sees the real ones alone."""
    make_checkpoint(tmp_path, "llama")
    runner = open_runner(tmp_path, native="required")
    assert isinstance(runner.model, NativeDecoder)
    Driver(runner).run([Job(prompt_of(5, 199), num_tokens=1)])
    spare = runner.storage.num_blocks
    for layer in runner.storage.layers:
        for tensor in layer.tensors():
            assert np.isnan(tensor[spare]).all()
    runner.close()


@pytest.mark.parametrize("level", ["avx512", "avx512_fp16"])
def test_float16_checkpoints(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served in 16 bits: exactly where float16 is multiplied, rounded to bfloat16 elsewhere."""
    if level not in machine_levels():
        pytest.skip(f"the processor has no {level}")
    monkeypatch.setattr("engine.model.back_end.load_native", lambda: load_level(level))
    model = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True).half()
    model.save_pretrained(tmp_path)
    runner = open_runner(tmp_path, native="required", dtype="bfloat16")
    assert isinstance(runner.model, NativeDecoder)
    output = runner.model.model.layers[1].attention.output
    found = {
        "model.layers.1.self_attn.o_proj.weight": NativeProduct(output.packed)(torch.eye(48)).T,
        "model.embed_tokens.weight": NativeProduct(runner.model.model.head.packed)(torch.eye(48)).T,
    }
    (job,) = Driver(runner).run([Job(prompt_of(30, 199), num_tokens=8, sampling=GREEDY)])
    runner.close()
    for name, values in found.items():
        stored = model.state_dict()[name]
        kept = stored if level == "avx512_fp16" else stored.bfloat16()
        assert torch.equal(values, kept.float())
    (other,) = generated(tmp_path, [Job(prompt_of(30, 199), num_tokens=8, sampling=GREEDY)], native="off")
    assert_near(job, other, 0.01 if level == "avx512_fp16" else BFLOAT16_TOLERANCE)
