"""`[engine]`: defaults that work, and mistakes that are named."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig, load, num_threads
from engine.model.plan import plan_input
from runtime.config import ModelConfig, load_section
from runtime.errors import ConfigError


def test_the_defaults_are_valid() -> None:
    load_section({}, "engine", EngineConfig).validate()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"max_num_seqs": 4}, "max_num_seqs"),
        ({"scheduler": {"max_num_seqs": 0}}, "scheduler.max_num_seqs = 0"),
        ({"scheduler": {"max_num_seqs": 4096}}, "lower the former"),
        ({"scheduler": {"long_prefill_share": 1.5}}, "long_prefill_share"),
        ({"scheduler": {"watermark": 0.9}}, "watermark"),
        ({"scheduler": {"max_preemptions": 0}}, "max_preemptions"),
        ({"cache": {"block_size": 0}}, "cache.block_size"),
        ({"cache": {"kv_dtype": "int4"}}, r"kv_dtype: .*'int4'; expected one of auto, .*kivi4"),
        ({"cache": {"kv_dtype_layers": {"0": "int4"}}}, r"kv_dtype_layers.*expected one of auto, .*kivi4"),
        (
            {"make": "vllm", "cache": {"kv_dtype_layers": {"0": "int8"}}},
            r"cache\.kv_dtype_layers: .*kv_cache_dtype_skip_layers",
        ),
        ({"simulation": {"first_token_id": 5000}}, "first_token_id"),
        ({"dtype": "float64"}, "dtype"),
    ],
)
def test_mistakes_are_named(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_section({"engine": table}, "engine", EngineConfig).validate()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"make": "vllm"}, r"engine\.make: .*engine\.vllm\.tensor_parallel_size"),
        ({"simulated": True}, r"engine\.simulated: .*set all degrees to 1"),
        ({"device": "cuda"}, r"engine\.device: .*set it to cpu or auto"),
        ({"native": "off"}, r"engine\.native: .*native kernels; set it to auto"),
        ({"quantize": "w8a8"}, r"engine\.quantize: .*int8, int4 or off"),
        ({"speculation": {"method": "draft_model"}}, r"engine\.speculation\.method: .*ngram"),
        ({"speculation": {"method": "mtp"}}, r"engine\.speculation\.method: .*ngram"),
        ({"cache": {"host_bytes": 1 << 20}}, r"engine\.cache\.host_bytes: .*set it to 0"),
        ({"cache": {"disk_path": "/tmp/kept"}}, r"engine\.cache\.disk_path: "),
        ({"parallel": {"tensor": 0}}, "parallel.tensor"),
        ({"parallel": {"tensor": 17}}, "parallel.tensor"),
        ({"parallel": {"expert": 17}}, "parallel.expert"),
        (
            {"parallel": {"tensor": 4, "pipeline": 8}},
            r"engine\.parallel\.pipeline = 8: .*32 ranks.* 16 at most",
        ),
        (
            {"parallel": {"tensor": 2, "expert": 3}},
            r"engine\.parallel\.expert = 3: neither .*; set it to 1 or 2",
        ),
    ],
)
def test_what_does_not_go_with_ranks_is_named(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_section({"engine": {"parallel": {"tensor": 2}} | table}, "engine", EngineConfig).validate()


def test_adapters_beside_a_checkpoint_are_served_where_ranks_share_it() -> None:
    tables = {"model": {"path": "models/millrace-nano"}, "engine": {"parallel": {"tensor": 2}}}
    assert load(tables).adapters.paths.keys() == {"entries", "pirate"}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"num_draft_tokens": 0}, r"speculation\.num_draft_tokens = 0: must be at least 1"),
        ({"num_draft_tokens": 65}, r"speculation\.num_draft_tokens = 65: 64 at most; lower it"),
        ({"max_ngram": 65}, r"speculation\.max_ngram = 65: 64 at most; lower it"),
        ({"answer_tokens": 10**9}, r"speculation\.answer_tokens = 1000000000: 16777216 at most.*lower it"),
        ({"min_ngram": 0}, r"speculation\.min_ngram = 0: must be at least 1"),
        ({"min_ngram": 5}, r"speculation\.min_ngram = 5: exceeds max_ngram = 4.*lower it, or raise that"),
        ({"min_acceptance": -0.1}, r"speculation\.min_acceptance = -0\.1: a share, from 0 to 1"),
        ({"min_acceptance": 1.5}, r"speculation\.min_acceptance = 1\.5: a share"),
        ({"min_acceptance": float("nan")}, r"speculation\.min_acceptance = nan: a share"),
        ({"method": "lookahead", "lookahead_window": 63}, r"lookahead_window = 63: .*260 rows.*256 at most"),
        ({"method": "draft_model"}, r"speculation\.draft_model = '': .*name it, or set the method"),
        ({"method": "eagle3"}, r"speculation\.draft_model = '': .*name it"),
        ({"method": "medusa"}, r"speculation\.draft_model = '': .*name it"),
        ({"method": "ngram", "draft_model": "x"}, r"draft_model = 'x': .*'ngram' reads none; leave it empty"),
        ({"method": "suffix", "draft_model": "x"}, r"draft_model = 'x': .*reads none"),
        ({"method": "lookahead", "draft_model": "x"}, r"draft_model = 'x': .*reads none"),
        ({"method": "mtp", "tree": [[0, 0]]}, r"speculation\.tree has \[0, 0\].*leave it out"),
        ({"method": "mtp", "tree": [[1], [1]]}, r"speculation\.tree has \[1\].*leave it out"),
    ],
)
def test_a_setting_of_speculation_that_cannot_work_is_named(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load({"engine": {"speculation": table}})


@pytest.mark.parametrize(
    "table",
    [{"method": "ngram", "min_ngram": 4}, {"method": "mtp", "tree": [[1, 0]]}, {"min_acceptance": 1.0}]
    + [
        {"method": method, "draft_model": "x"} for method in ("off", "draft_model", "eagle3", "medusa", "mtp")
    ],
)
def test_settings_of_speculation_that_work_are_taken(table: dict[str, object]) -> None:
    load({"engine": {"speculation": table}})


@pytest.mark.parametrize(
    ("overlap", "method", "device", "overlaps"),
    [
        ("auto", "off", "cpu", False),
        ("on", "off", "cpu", True),
        ("on", "suffix", "cpu", None),
        ("on", "lookahead", "cpu", None),
        ("auto", "suffix", "cpu", False),
        ("auto", "suffix", "cuda", True),
        ("on", "ngram", "cuda", True),
        ("off", "ngram", "cuda", False),
        ("auto", "draft_model", "cuda", False),
        ("on", "draft_model", "cuda", None),
    ],
)
def test_overlap_that_is_asked_for_is_there_or_refused(
    overlap: str, method: str, device: str, overlaps: bool | None
) -> None:
    speculation = {"method": method, "draft_model": "x" if method == "draft_model" else ""}
    table = {"scheduler": {"overlap": overlap}, "speculation": speculation, "device": device}
    config = load_section({"engine": table}, "engine", EngineConfig)
    if overlaps is None:
        with pytest.raises(ConfigError, match=r'engine\.scheduler\.overlap = "on": .*wait.*set it to auto'):
            config.validate()
    else:
        config.validate()
        assert config.overlaps(device) is overlaps


def test_overlap_that_cannot_be_is_refused_once_the_device_is_known() -> None:
    config = load({"engine": {"scheduler": {"overlap": "on"}, "speculation": {"method": "ngram"}}})
    model = ModelConfig(path="models/millrace-nano")
    with pytest.raises(ConfigError, match=r'engine\.scheduler\.overlap = "on"'):
        plan_input(config, model, device="cpu", available_bytes=1 << 30)
    plan_input(config, model, device="cuda", available_bytes=1 << 30)


@pytest.mark.parametrize(("asked", "threads"), [("", 8), ("3", 3), ("0", 8), ("4,2", 8)])
def test_threads_are_as_many_as_was_asked_for(
    asked: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.config.num_cores", lambda: 8)
    assert num_threads({"OMP_NUM_THREADS": asked}) == threads
    assert num_threads({}) == 8


@pytest.mark.parametrize(("name", "adapters"), [("nano", {"entries", "pirate"}), ("draft", set())])
def test_an_engine_that_is_told_its_models_name_has_the_adapters_beside_that_model(
    name: str, adapters: set[str]
) -> None:
    models = {"nano": {"path": "models/millrace-nano"}, "draft": {"path": "models/millrace-nano-draft"}}
    assert load({"models": models, "model": {"name": name}}).adapters.paths.keys() == adapters
