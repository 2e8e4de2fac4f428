"""Which sampling options a checkpoint's requests are drawn by, and who says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest

from checkpoint.sampling_defaults import read_sampling_defaults

LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
OF_FILE, OF_LLAMA_CPP = "general.sampling.* of the GGUF file", "llama.cpp, as the GGUF file recommends none"


def written(folder: Path, **sampling: Any) -> Path:
    """A GGUF file that recommends this."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in sampling.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_file_that_recommends_nothing_gets_llama_cpps(tmp_path: Path) -> None:
    found = read_sampling_defaults(written(tmp_path))
    assert found.options == LLAMA_CPP
    assert set(found.sources.values()) == {OF_LLAMA_CPP}


def test_what_a_file_recommends_goes_before(tmp_path: Path) -> None:
    found = read_sampling_defaults(written(tmp_path, temp=0.6, top_k=-1, penalty_repeat=1.05))
    own = {"temperature": 0.6, "top_k": 0, "repetition_penalty": 1.05}
    assert found.options == LLAMA_CPP | own
    assert {name for name, source in found.sources.items() if source == OF_FILE} == set(own)


def test_what_there_is_not_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_sampling_defaults(written(tmp_path, mirostat=2, xtc_probability=0.0))
    assert "general.sampling.mirostat is not followed" in caplog.text
    assert "xtc" not in caplog.text


@pytest.mark.parametrize("beside", [{"temperature": 0.3}, {"do_sample": False}])
def test_a_generation_config_beside_the_file_says_all(tmp_path: Path, beside: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    assert read_sampling_defaults(written(tmp_path, temp=0.6)).options == {}


def test_one_that_says_nothing_of_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert read_sampling_defaults(written(tmp_path)).options == LLAMA_CPP


def test_other_checkpoints_have_what_their_own_file_says(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path).options == {}
