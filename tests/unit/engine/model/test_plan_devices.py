"""`millrace plan --devices`: the fewest devices that fit, what sharing costs, and why some ways are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.model.plan_command import main
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.hybrids import HYBRIDS

_CONFIG = """
[model]
path = "{path}"
[engine]
dtype = "float32"
max_model_len = 64
[engine.scheduler]
max_num_batched_tokens = 64
max_num_seqs = 4
"""


def plan(folder: Path, *arguments: str, beside: str = "") -> int:
    file = folder / "millrace.toml"
    file.write_text(_CONFIG.format(path=folder) + beside)
    return main(["--config", str(file), *arguments])


def test_the_fewest_devices_that_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=9600)
    assert plan(tmp_path, "--devices=4", "--device-gib=0.07", "--json") == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    sizes = [(each["tensor"] * each["pipeline"], each["expert"] * each["pipeline"]) for each in ways]
    assert sizes == sorted(sizes, key=max)
    by_degrees = {(each["tensor"], each["expert"], each["pipeline"]): each for each in ways}
    alone, cut, spread = by_degrees[1, 1, 1], by_degrees[2, 1, 1], by_degrees[1, 2, 1]
    assert not alone["fits"]
    assert alone["reason"].startswith("memory plan: 71.7 MiB available, weights 42.")
    assert (cut["fits"], spread["fits"]) == (True, True)
    assert cut["weights_bytes"] < spread["weights_bytes"] < 0.6 * 44e6
    # Two layers of 48 with two sums of two parts, and the logits of 199; rows of two experts of each token.
    assert (cut["exchanged_bytes_per_token"], cut["meetings_per_step"]) == (4 * (2 * 2 * 2 * 48 + 199), 5)
    assert (spread["exchanged_bytes_per_token"], spread["meetings_per_step"]) == (4 * (2 * 2 * 48 + 199), 3)
    assert plan(tmp_path, "--devices=4", "--device-gib=0.07") == 0
    assert "2 devices of 71.7 MiB fit: engine.parallel.pipeline = 2." in capsys.readouterr().out


def test_a_load_decides_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path, "llama")
    load = ("--streams=8", "--prompt=30", "--output=30")
    assert plan(tmp_path, "--devices=2", *load) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "None of these fits into devices of " in told
    assert (
        "With 2: 8 streams of 30 + 30 tokens do not run at once: engine.scheduler.max_num_seqs is 4" in told
    )


def test_states_are_counted_by_what_a_device_has_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, "bamba", **HYBRIDS["bamba"][1] | {"mamba_n_groups": 1})
    assert plan(tmp_path, "--devices=2", "--json") == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    by_degrees = {(each["tensor"], each["pipeline"]): each for each in ways}
    alone, cut, staged = by_degrees[1, 1], by_degrees[2, 1], by_degrees[1, 2]
    assert min(each["num_states"] for each in ways) >= 4 + 4
    # Three inputs of each channel and a matrix for each of the heads, in two layers; the keys of the only
    # group are the same on both devices.
    values, keys = 8 * 12, 20
    assert alone["state_bytes"] == 2 * 4 * (3 * (values + 2 * keys) + values * keys)
    assert cut["state_bytes"] == 2 * 4 * (3 * (values // 2 + 2 * keys) + values // 2 * keys)
    assert staged["state_bytes"] == alone["state_bytes"] // 2
    # What three layers' halves give of 48 by two parts, squares of two norms, and the logits.
    assert (cut["exchanged_bytes_per_token"], cut["meetings_per_step"]) == (
        4 * (6 * 2 * 48 + 2 * 2 + 199),
        6 + 2 + 1,
    )
    assert plan(tmp_path, "--devices=2") == 0
    assert "states" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "beside", "reason"),
    [
        (
            "llama",
            '[engine.speculation]\nmethod = "lookahead"\n',
            "engine.speculation.method: does not go with",
        ),
        ("gpt2", "", "engine.parallel.tensor = 2: "),
    ],
)
def test_what_cannot_be_shared_says_why(
    family: str, beside: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, family)
    assert plan(tmp_path, "--devices=3", beside=beside) == 0
    told = capsys.readouterr().out
    assert reason in told
    assert "one device fits: no engine.parallel is needed." in told
