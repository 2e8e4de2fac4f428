"""What stays of a prompt under kvzap is what its scorer says of the states that attention computes upon, and
answers are those of a model that sees no more, whatever becomes of the memory.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import nn

from contract.retention import Retention
from engine.config import CacheConfig, EngineConfig
from engine.model.kv_scorer import FOLDER, KvScorerConfig, find_scorer, gelu
from engine.model.plan import make_plan, plan_input
from engine.model.plan_command import main as print_plan
from engine.runner.build import build_here
from engine.runner.forgotten.scores import LayerScores
from engine.runner.forgotten.votes import chosen_of
from engine.runner.runner import ModelRunner
from engine.speculation_config import SpeculationConfig
from engine.types import ChosenTokens, KeptBlocks
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.runner.cuda.test_device_runner import open_device_runner
from tests.unit.engine.runner.driver import open_runner, prompt_of
from tests.unit.engine.runner.test_chosen import Choosing, answer
from tests.unit.engine.runner.test_retention import BLOCK, check_among_others, generate
from tests.unit.engine.runner.test_window import computed_by

LAST, SINKS = 128, 4
ASKED: list[tuple[list[int], Retention | None]] = [
    (prompt_of(186, 199, seed=1), Retention(policy="kvzap", keep=0.75)),
    (prompt_of(173, 199, seed=2), Retention(policy="kvzap", window_tokens=1)),
    # The same without, which finds the blocks of the first.
    (prompt_of(186, 199, seed=1), None),
    (prompt_of(180, 199, seed=3), Retention(policy="kvzap", window_tokens=150)),
]


class KVzapModel(nn.Module):
    """As kvpress has it, which is Apache-2.0: names and shapes of its tensors, and what they compute."""

    def __init__(self, config: KvScorerConfig) -> None:
        super().__init__()
        inputs, outputs, inner = config.input_dim, config.output_dim, config.hidden_dim
        self.layers = nn.ModuleList(
            nn.Linear(inputs, outputs)
            if inner is None
            else nn.Sequential(nn.Linear(inputs, inner), nn.GELU(), nn.Linear(inner, outputs))
            for _ in range(config.n_modules)
        )

    def save(self, folder: Path, config: KvScorerConfig, dtype: torch.dtype = torch.float32) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value.to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(state, str(folder / "model.safetensors"))
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        return folder


def config_of(model: transformers.PreTrainedModel, hidden_dim: int | None = None) -> KvScorerConfig:
    config = model.config
    return KvScorerConfig(
        input_dim=config.hidden_size,
        output_dim=config.num_key_value_heads,
        n_modules=config.num_hidden_layers,
        hidden_dim=hidden_dim,
    )


def trained(model: transformers.PreTrainedModel, hidden_dim: int | None = None) -> KVzapModel:
    torch.manual_seed(7)
    return KVzapModel(config_of(model, hidden_dim)).requires_grad_(False)


class Scoring(Choosing):
    """A transformers model whose answer sees what a scorer leaves of its prompt."""

    def __init__(self, model: transformers.PreTrainedModel, scorer: KVzapModel) -> None:
        super().__init__(model)
        self.scorer = scorer
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self._entering, with_kwargs=True)

    def _entering(self, module: Any, _: Any, given: dict[str, Any]) -> None:
        self.states = given["hidden_states"][0]

    def stays(self, layer: int, whole: torch.Tensor, num_kv: int) -> torch.Tensor:
        assert self.asked is not None
        num_prompt = self.num_prompt
        scores = self.scorer.layers[layer](self.states[:num_prompt]).T.clone()
        scores[:, :SINKS] = scores[:, -LAST:] = float("inf")
        count = num_kept(num_prompt, self.asked)
        return torch.zeros(num_kv, num_prompt, dtype=torch.bool).scatter(1, scores.topk(count).indices, True)

    def num_kept(self) -> int:
        assert self.asked is not None
        return num_kept(self.num_prompt, self.asked)


def num_kept(num_prompt: int, asked: Retention) -> int:
    """Tokens that stay of a prompt, in whole blocks but for its last."""
    tail = num_prompt % BLOCK
    return -(-(max(asked.tokens_of(num_prompt), LAST) - tail) // BLOCK) * BLOCK + tail


@pytest.fixture(scope="module")
def scorer(oracle: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(oracle).save(tmp_path_factory.mktemp("scorer"), config_of(oracle))


@pytest.fixture(scope="module")
def expected(folder: Path, oracle: transformers.PreTrainedModel, scorer: Path) -> list[list[int]]:
    """Answers that are the model's, one after another."""
    with closing(opened(folder, scorer)) as runner:
        answers = [answer(runner, prompt, asked)[0][0] for prompt, asked in ASKED]
    model = Scoring(oracle, trained(oracle))
    for tokens, (prompt, asked) in zip(answers, ASKED, strict=True):
        assert model.said(prompt, asked, tokens) == tokens
        assert (model.said(prompt, None, tokens) == tokens) == (asked is None)
    return answers


def opened(folder: Path, scorer: Path, num_blocks: int = 80, **options: Any) -> ModelRunner:
    cache = {"kvzap": str(scorer)} | options.pop("cache", {})
    return open_runner(folder, kv_cache_bytes=num_blocks * 6144, cache=cache, **options)


@pytest.mark.parametrize(
    ("kernels", "num_blocks", "prefix_caching", "budget"),
    [
        ("torch", 50, True, 48),
        ("native", 50, True, 48),
        ("native", 50, False, 23),
        ("native", 99, True, 512),
    ],
)
def test_tokens_equal_a_model_that_sees_no_more(
    folder: Path,
    scorer: Path,
    expected: list[list[int]],
    kernels: str,
    num_blocks: int,
    prefix_caching: bool,
    budget: int,
) -> None:
    with closing(opened(folder, scorer, num_blocks, **computed_by(kernels))) as runner:
        assert runner.storage.num_blocks == num_blocks
        check_among_others(
            runner,
            expected,
            prefix_caching=prefix_caching,
            asked_of=ASKED,
            max_num_batched_tokens=budget,
        )


def test_choices_and_what_another_engine_began_are_the_same_answer(
    folder: Path, scorer: Path, expected: list[list[int]]
) -> None:
    with closing(opened(folder, scorer)) as runner:
        choices, _ = answer(runner, *ASKED[0], n=3)
        rest, _ = answer(runner, *ASKED[1], output=expected[1][:37])
    assert choices == dict.fromkeys(range(3), expected[0])
    assert rest[0] == expected[1][37:]


def test_answers_run_beside_captured_ones(folder: Path, scorer: Path, expected: list[list[int]]) -> None:
    """Graphs of a GPU, whose rules are checked on a CPU."""
    with closing(open_device_runner(folder, kv_cache_bytes=80 * 6144)) as runner:
        runner.table.scorer = find_scorer(str(scorer), folder, runner.model.spec, "")
        tokens, _ = generate(runner, prefix_caching=True, max_num_seqs=3, overlap=True, asked_of=ASKED)
    assert tokens == {(number, 0): each for number, each in enumerate(expected)}


def test_what_was_not_chosen_is_measured(
    folder: Path, scorer: Path, oracle: transformers.PreTrainedModel, expected: list[list[int]]
) -> None:
    prompt, asked = ASKED[0]
    assert asked is not None
    model = Scoring(oracle, trained(oracle))
    model.said(prompt, asked, expected[0])
    lost = torch.stack(list(model.lost.values()))[:, :, len(prompt) :].mean((0, 1)).sum()
    with closing(opened(folder, scorer)) as runner:
        tokens, statistics = answer(runner, prompt, replace(asked, max_lost=1.0))
        assert tokens[0] == expected[0]
        assert float(lost) <= statistics.lost_tokens <= 1.1 * float(lost)
        # Computed anew with all of it, before anything was lost.
        tokens, _ = answer(runner, prompt, replace(asked, max_lost=1e-9))
        assert tokens[0] == expected[2]


def spec_of(folder: Path) -> Any:
    model = ModelConfig(path=str(folder))
    return plan_input(EngineConfig(), model, device="cpu", available_bytes=1 << 40).spec


@pytest.mark.parametrize("hidden_dim", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_those_of_kvpress(
    folder: Path,
    oracle: transformers.PreTrainedModel,
    tmp_path: Path,
    hidden_dim: int | None,
    dtype: torch.dtype,
) -> None:
    """Linear ones and those of two layers, on arrays and on tensors, whatever the cuts."""
    model = trained(oracle, hidden_dim).to(dtype).float()
    config = config_of(oracle, hidden_dim)
    scorer = find_scorer(str(model.save(tmp_path, config, dtype)), folder, spec_of(folder), "")
    assert scorer is not None
    states = torch.randn(230, config.input_dim)
    kept = KeptBlocks.of(Retention(policy="kvzap", keep=0.7), len(states), BLOCK)
    assert isinstance(kept, ChosenTokens)
    wanted = model.layers[1](states).T
    found = []
    for given in (states, states.numpy()):
        for cuts in ([], [1, 109, 110, 200], list(range(0, 230, 7)), [128]):
            sums = np.zeros((config.output_dim, kept.num_whole * BLOCK))
            scores = LayerScores(sums, scorer, 1)
            for start, end in zip([0, *cuts], [*cuts, 230], strict=True):
                scores.read(given[start:end], start)
                # Some are computed twice.
                scores.read(given[start:end], start)
            found.append(sums)
    assert all((each == found[0]).all() for each in found[:4])
    assert all((each == found[4]).all() for each in found[4:])
    for each in (found[0], found[4]):
        np.testing.assert_allclose(each[:, SINKS:], wanted[:, SINKS : each.shape[1]], rtol=1e-5, atol=1e-5)
        stays = np.zeros(wanted.shape, np.bool_)
        np.put_along_axis(stays, chosen_of(each, kept), True, 1)
        stays[:, each.shape[1] :] = True
        by_rule = wanted.clone()
        by_rule[:, :SINKS] = by_rule[:, -LAST:] = float("inf")
        best = torch.zeros(wanted.shape, dtype=torch.bool).scatter(
            1, by_rule.topk(stays[0].sum()).indices, True
        )
        assert (stays == best.numpy()).all()


@pytest.mark.parametrize("hidden_dim", [None, 24])
def test_scores_are_those_of_kvpress_itself(
    folder: Path, oracle: transformers.PreTrainedModel, tmp_path: Path, hidden_dim: int | None
) -> None:
    """Its KVzapPress, with a model that its KVzapModel saved."""
    pytest.importorskip("kvpress", reason="kvpress is not installed")
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapPress
    from kvpress.presses.kvzap_press import KVzapModel as TheirModel

    config = config_of(oracle, hidden_dim)
    sizes = {name: getattr(config, name) for name in ("input_dim", "output_dim", "n_modules", "hidden_dim")}
    model = TheirModel(KVzapConfig(**sizes))
    model.save_pretrained(tmp_path)
    scorer = find_scorer(str(tmp_path), folder, spec_of(folder), "")
    assert scorer is not None
    press = KVzapPress()
    press.kvzap_model = TheirModel.from_pretrained(tmp_path)
    states = torch.randn(50, config.input_dim)
    for layer in range(config.n_modules):
        with torch.no_grad():
            theirs = press.score(SimpleNamespace(layer_idx=layer), states[None], *[torch.zeros(0)] * 3, {})[0]
        np.testing.assert_allclose(scorer.score(layer, states.numpy()), theirs, rtol=1e-5, atol=1e-5)


def test_gelu_is_that_of_torch() -> None:
    x = np.linspace(-9, 9, 20_001, dtype=np.float32)
    np.testing.assert_allclose(gelu(x), torch.nn.functional.gelu(torch.from_numpy(x)), rtol=1e-6, atol=1e-6)


def changed(**values: Any) -> Any:
    return lambda config, state: (replace(config, **values), state)


def without(name: str) -> Any:
    return lambda config, state: (config, {key: value for key, value in state.items() if key != name})


BAD = [
    (changed(n_modules=1), "its n_modules is 1, and LlamaForCausalLM has 2 layers; train one for"),
    (changed(input_dim=8), "its input_dim is 8, and LlamaForCausalLM has .* hidden elements; train"),
    (changed(output_dim=5), "its output_dim is 5, and LlamaForCausalLM has . kv heads; train one"),
    (changed(model_type="llama"), "its model_type is 'llama', not 'kvzap'"),
    (changed(hidden_dim=4), r"tensor layers\.0\.0\.weight is missing, not F32 or .*train it again"),
    (without("layers.1.bias"), r"tensor layers\.1\.bias is missing"),
]


@pytest.mark.parametrize(("change", "problem"), BAD)
def test_a_scorer_of_another_model_is_refused(
    folder: Path, oracle: transformers.PreTrainedModel, tmp_path: Path, change: Any, problem: str
) -> None:
    config, state = change(config_of(oracle), trained(oracle).state_dict())
    save_file(dict(state), str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(ConfigError, match=rf"^engine\.cache\.kvzap = '{tmp_path}': {problem}"):
        opened(folder, tmp_path)


def test_what_is_no_scorer_is_refused(
    folder: Path, oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"kvzap = '.*no': .*No such file.*that millrace train-kvzap wrote"):
        opened(folder, tmp_path / "no")
    (trained(oracle).save(tmp_path, config_of(oracle)) / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ConfigError, match=r"is not a whole safetensors file.*name a folder"):
        opened(folder, tmp_path)


def test_tokens_whose_score_overflows_are_the_last_to_stay() -> None:
    overflows = SimpleNamespace(score=lambda layer, states: np.array([[np.nan, np.inf, -np.inf, 1.0] * 16]))
    sums = np.zeros((1, 64))
    LayerScores(sums, cast(Any, overflows), 0).read(np.zeros((64, 8), np.float32), 0)
    assert (sums[:, :SINKS] == np.inf).all()
    assert sums[0, SINKS : SINKS + 4].tolist() == [-1e30, 1e30, -1e30, 1.0]


def test_a_model_that_can_forget_nothing_takes_no_scorer(folder: Path, scorer: Path) -> None:
    with pytest.raises(ConfigError, match=r"no answer of this model may forget: it is latent; set it to ''"):
        find_scorer(str(scorer), folder, spec_of(folder), "it is latent")
    assert find_scorer("", folder, spec_of(folder), "it is latent") is None


def test_the_plan_refuses_a_scorer_of_another_model(
    scorer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text(f'[model]\npath = "models/millrace-nano"\n[engine.cache]\nkvzap = "{scorer}"\n')
    assert print_plan(["--config", str(file)]) == 2
    assert f"engine.cache.kvzap = '{scorer}': its n_modules is " in capsys.readouterr().err


def test_the_plan_refuses_a_scorer_beside_a_draft_model(
    folder: Path, scorer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the engine does."""
    file = tmp_path / "millrace.toml"
    file.write_text(
        f'[model]\npath = "{folder}"\n[engine.cache]\nkvzap = "{scorer}"\n'
        f'[engine.speculation]\nmethod = "draft_model"\ndraft_model = "{folder}"\n'
    )
    assert print_plan(["--config", str(file)]) == 2
    said = (
        f"engine.cache.kvzap = '{scorer}': no answer of this model may forget: a draft model reads the same"
    )
    assert said in capsys.readouterr().err
    speculation = SpeculationConfig(method="draft_model", draft_model=str(folder))
    with pytest.raises(ConfigError, match=re.escape(said)):
        opened(folder, scorer, speculation=speculation)


@pytest.mark.parametrize("hidden_dim", [None, 24])
def test_the_plan_counts_the_scorer(
    folder: Path, oracle: transformers.PreTrainedModel, tmp_path: Path, hidden_dim: int | None
) -> None:
    """In the host's memory: beside a GPU it takes nothing of the device."""
    place = trained(oracle, hidden_dim).save(tmp_path, config_of(oracle, hidden_dim), torch.bfloat16)
    scorer = find_scorer(str(place), folder, spec_of(folder), "")
    assert scorer is not None
    for device, taken in (("cpu", scorer.num_bytes), ("cuda", 0)):
        without, beside = (
            make_plan(
                plan_input(
                    EngineConfig(cache=CacheConfig(kvzap=kvzap)),
                    ModelConfig(path=str(folder)),
                    device=device,
                    available_bytes=1 << 40,
                )
            )
            for kvzap in ("", str(place))
        )
        assert beside.weights_bytes - without.weights_bytes == taken


def test_a_scorer_in_the_models_folder_is_found(
    folder: Path, oracle: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    own = tmp_path / "model"
    own.mkdir()
    for file in folder.iterdir():
        (own / file.name).symlink_to(file)
    for there in (False, True):
        if there:
            trained(oracle).save(own / FOLDER, config_of(oracle))
        config = EngineConfig(dtype="float32", num_threads=1, cache=CacheConfig(kv_cache_bytes=1 << 20))
        runner, _, facts = build_here(config, ModelConfig(path=str(own)), lambda phase, part: None)
        runner.close()
        assert ("engine.cache.kvzap" in facts.unscored_because) != there
