"""vLLM loads what `millrace quantize` writes, and answers as this engine does; what its build for CPUs does
not load it refuses by name, as docs/quantize.md says.

Log-probabilities of a given text are compared, and greedy answers as far as arithmetic allows: each token
that vLLM takes is the likeliest of this engine's, or nearly so, after the same tokens.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.vllm_core.install import inherited
from services.quantize.choices import MethodName, SchemeName
from services.supervisor.config import BUNDLED_MODEL
from tests.deployment.containerfile import REPOSITORY
from tests.e2e.stack import VLLM_SETTINGS
from tests.unit.services.quantize.test_real import by_engine, made

pytestmark = [pytest.mark.usefixtures("quantizer"), pytest.mark.timeout(900)]

TEXT = (
    "<|im_start|>user\nTell me a story about a red fox that lives in the forest.<|im_end|>\n"
    "<|im_start|>assistant\nOnce upon a time there was a red fox. It lived in a forest near a river,"
)
NUM_TOKENS = 24
# Nats by which a token that vLLM takes may be less likely here than the likeliest.
MARGIN = 0.25
_ASK = """
import json, sys
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
model = LLM(model=given["folder"], dtype=given["dtype"], enforce_eager=True, max_model_len=512)
sampling = SamplingParams(temperature=0, max_tokens=given["num_tokens"], prompt_logprobs=1, ignore_eos=True)
(found,) = model.generate([{"prompt_token_ids": given["prompt"]}], sampling, use_tqdm=False)
rows = zip(given["prompt"][1:], found.prompt_logprobs[1:])
logprobs = [row[token].logprob for token, row in rows]
json.dump({"ids": list(found.outputs[0].token_ids), "logprobs": logprobs}, open(given["out"], "w"))
"""


def ask(python: Path, folder: Path, prompt: list[int]) -> tuple[dict[str, Any] | None, str]:
    """What vLLM says to a prompt, if it loads the folder, and what it has logged."""
    out = folder.parent / f"{folder.name}.json"
    given = {
        "folder": str(folder),
        "dtype": VLLM_SETTINGS.get("MILLRACE_ENGINE__DTYPE", "auto"),
        "num_tokens": NUM_TOKENS,
        "prompt": prompt,
        "out": str(out),
    }
    kept = {name: value for name, value in inherited().items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables = {
        **kept,
        # What it raises is then raised here, and no process of its own is left.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), "-P", "-c", _ASK, json.dumps(given)]
    asked = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    found = json.loads(out.read_text()) if asked.returncode == 0 else None
    return found, asked.stdout + asked.stderr


def prompt_ids() -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")).encode(TEXT).ids
    return ids


def scored(folder: Path, ids: list[int]) -> torch.Tensor:
    """This engine's log-probabilities [T - 1, V] after each of the tokens."""
    vocab_size = json.loads((BUNDLED_MODEL / "config.json").read_text())["vocab_size"]
    return by_engine(folder, ids, vocab_size)


def of_tokens(logprobs: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Those of one token for each of the first rows."""
    return logprobs[: len(ids)].gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("scheme", "method", "tolerance"),
    [
        ("w8a8", "rtn", 0.1),
        ("w8a8", "smoothquant", 0.1),
        ("int4", "rtn", 0.1),
        # With zero points.
        ("int4", "awq", 0.1),
        # vLLM rounds inputs as well, which this engine does not on CPUs.
        ("fp8", "rtn", 0.2),
    ],
)
def test_vllm_answers_as_this_engine_does(
    scheme: SchemeName, method: MethodName, tolerance: float, tmp_path: Path, vllm: Path
) -> None:
    made(BUNDLED_MODEL, tmp_path / "out", scheme, method)
    prompt = prompt_ids()
    found, log = ask(vllm, tmp_path / "out", prompt)
    assert found is not None, log[-3000:]
    ours = scored(tmp_path / "out", prompt + found["ids"])
    # Of the given text, in the mean: both round inputs and products in their own way.
    theirs = torch.tensor(found["logprobs"])
    apart = float((of_tokens(ours, prompt[1:]) - theirs).abs().mean())
    assert apart < tolerance
    if scheme == "int4":
        # They are those of the result, and not of the original.
        dense = of_tokens(scored(BUNDLED_MODEL, prompt), prompt[1:])
        assert float((dense - theirs).abs().mean()) > 3 * apart
    # And of what it says.
    said = ours[len(prompt) - 1 :]
    lost = said.max(1).values - of_tokens(said, found["ids"])
    assert len(found["ids"]) == NUM_TOKENS
    assert float(lost.max()) < MARGIN, lost


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        ("int8", "Failed to find a kernel that can implement the WNA16 linear layer"),
        ("mxfp4", "Failed to find a kernel that can implement the MXFP4 linear layer"),
        ("nf4", "Unknown quantization method: bitsandbytes"),
    ],
)
def test_what_vllm_does_not_load_on_cpus_is_what_the_page_says(
    scheme: SchemeName, told: str, tmp_path: Path, vllm: Path
) -> None:
    made(BUNDLED_MODEL, tmp_path / "out", scheme, "rtn")
    found, log = ask(vllm, tmp_path / "out", prompt_ids())
    assert found is None
    assert told in log
    page = (REPOSITORY / "docs/quantize.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{scheme}` |")]
    assert " no" in row.split("|")[4], row
