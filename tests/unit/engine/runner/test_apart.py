"""A model that another process loaded is the same model, and what serves it natively has no torch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import psutil
import pytest

from contract.frames import FrameBuffer
from engine.config import EngineConfig
from engine.core import messages
from engine.core.messages import encode
from engine.model.loader import LoaderLostError
from engine.model.spec import CheckpointError
from engine.runner.build import build, build_here
from engine.runner.runner import ModelRunner
from engine.types import GrammarSpec, Request, SamplingParams
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

BUNDLED = Path("models/millrace-nano")
ANSWER_LIMIT_S = 120.0

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "deepseek_v3": LATENT,
    "gpt_oss": {"head_dim": 16, "sliding_window": 10, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Records with fields that few have: positions, biases, coefficients, scales of queries, a shared gate.
    **{CASES[name][0]: CASES[name][1] for name in ("gpt2", "phi", "apertus", "ministral3", "qwen2-moe")},
}


def tokens_of(runner: ModelRunner, vocab_size: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of a few prompts, and their log-probabilities."""
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    jobs = [Job(prompt_of(length, vocab_size), num_tokens=12, sampling=sampling) for length in (3, 40, 7)]
    with closing(runner):
        done = Driver(runner).run(jobs)
    assert [len(job.output) for job in done] == [12] * 3, [job.failure for job in done]
    return [(job.output, [entry.logprob for entry in job.logprobs]) for job in done]


@pytest.mark.usefixtures("forked_loader")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_the_same(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, **FAMILIES[family])
    ours, theirs = (open_runner(tmp_path, native="required", build=way) for way in (build, build_here))
    assert tokens_of(ours, 199) == tokens_of(theirs, 199)


@pytest.mark.usefixtures("forked_loader")
@pytest.mark.parametrize("quantize", ["off", "w8a8", "int4"])
def test_the_bundled_model_is_the_same(quantize: str) -> None:
    """Calibrated smoothing, scales and minimums of groups, and bfloat16 arrive bit for bit."""
    options: dict[str, Any] = {"native": "required", "dtype": "bfloat16", "quantize": quantize}
    ours, theirs = (open_runner(BUNDLED, build=way, **options) for way in (build, build_here))
    assert tokens_of(ours, 2048) == tokens_of(theirs, 2048)


@pytest.mark.usefixtures("forked_loader")
def test_a_large_table_stays_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of it are looked up there by the process that serves, though another read the checkpoint."""
    make_checkpoint(tmp_path, "llama", vocab_size=70_000, hidden_size=64)
    ours = open_runner(tmp_path, native="required", build=build, dtype="float32")
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path) in maps
    theirs = open_runner(tmp_path, native="off", dtype="float32")
    for (tokens, _), (expected, _) in zip(tokens_of(ours, 70_000), tokens_of(theirs, 70_000), strict=True):
        assert tokens == expected


@pytest.mark.usefixtures("forked_loader")
def test_what_is_wrong_with_a_checkpoint_arrives(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 7}))
    with pytest.raises(CheckpointError, match=r"has shape .*config\.json implies"):
        open_runner(tmp_path, native="required", build=build)


def test_a_loader_that_is_lost_is_an_error() -> None:
    killed: list[int] = []

    def kill(stage: str, fraction: float) -> None:
        # Most of the model is still to come, more than a socket holds.
        if not killed:
            children = [
                each for each in psutil.Process().children() if "engine.model.loader" in each.cmdline()
            ]
            killed.extend(each.pid for each in children)
            for child in children:
                child.kill()

    config = EngineConfig(native="required", dtype="float32", num_threads=1)
    with pytest.raises(LoaderLostError, match=r"ended .*-9: killed"):
        build(config, ModelConfig(path=str(BUNDLED)), kill)
    assert len(killed) == 1


def test_a_core_serves_without_torch() -> None:
    """Penalties, biases, seeds, log-probabilities of prompts, grammars, forced tokens and lookup drafts."""
    grammar = GrammarSpec(
        digest="", payload=llguidance.grammar_from("regex", "[a-z]{3,9}").encode(), backend="llguidance/1"
    )
    asked = [
        SamplingParams(max_tokens=8, temperature=0.8, seed=3, top_p=0.9, top_k=40, min_p=0.01),
        SamplingParams(max_tokens=8, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={5: 2.0}),
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=2, min_tokens=4),
        SamplingParams(max_tokens=12, temperature=0.0),
    ]
    requests = [
        Request(
            request_id=index,
            external_id=str(index),
            prompt_token_ids=tuple(prompt_of(30, 2048)),
            sampling=sampling,
            grammar=grammar if index == 3 else None,
        )
        for index, sampling in enumerate(asked)
    ]
    config = {
        "native": "required",
        "dtype": "bfloat16",
        "quantize": "w8a8",
        "cache": {"kv_cache_bytes": 64 << 20, "kv_dtype": "int8"},
        "speculation": {"method": "ngram"},
    }
    start = messages.Start(
        config=msgspec.convert(config, EngineConfig), model=ModelConfig(path=str(BUNDLED.resolve()))
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = ("-m", "engine.core", "--fd", str(theirs.fileno()))
        core = subprocess.Popen([sys.executable, *arguments], pass_fds=(theirs.fileno(),))
        try:
            ours.settimeout(ANSWER_LIMIT_S)
            ours.sendall(encode(start))
            ended = _ended(ours, requests)
            maps = Path(f"/proc/{core.pid}/maps").read_text()
        finally:
            core.kill()
            core.wait()
    assert ended == {0, 1, 2, 3}
    assert "numpy" in maps
    assert "libtorch" not in maps


def _ended(connection: socket.socket, requests: Sequence[Request]) -> set[int]:
    """Submits requests when the core is ready; those that ended well."""
    buffer, decoder = FrameBuffer(), msgspec.msgpack.Decoder(messages.Report)
    ended: set[int] = set()
    while len(ended) < len(requests):
        data = connection.recv(1 << 20)
        assert data, "the core ended"
        for payload in buffer.feed(data):
            report = decoder.decode(payload)
            assert not isinstance(report, messages.CoreRefused), report
            if isinstance(report, messages.Ready):
                for request in requests:
                    connection.sendall(encode(messages.Submit(request)))
            if isinstance(report, messages.StepDone):
                assert not any(event.failure for event in report.events)
                ended |= {event.request_id for event in report.events if event.finish_reason is not None}
    return ended
