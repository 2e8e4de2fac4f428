"""The ids that the engine reads, draws and ends at are those of the checkpoint's tokenizer."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from engine.model.families import read_spec
from engine.model.spec import CheckpointError
from engine.speculation_config import SpeculationConfig
from engine.types import GrammarSpec, SamplingParams
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_logits
from tests.unit.engine.quantization import writers
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.tokenizer_svc.checkpoints import byte_level, write
from tokenizer_svc.text.checkpoint import load_checkpoint

CONTROL = ("<|end|>", "<|turn|>", "<|text|>")
ROWS = 600
SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "lm_head": True}


def checkpoint(
    folder: Path, *, generation: dict[str, Any] | None = None, eos_token: str = "", **changes: Any
) -> tuple[transformers.PreTrainedModel, Tokenizer]:
    """A model with padding rows, and the tokenizer that it comes with."""
    tokenizer = byte_level(CONTROL)
    changes = {"vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96} | changes
    model = make_checkpoint(folder, "llama", **changes)
    write(folder, tokenizer, config={"eos_token": eos_token} if eos_token else {}, generation=generation)
    return model, tokenizer


@pytest.mark.parametrize(
    ("generation", "config", "eos_token"),
    list(
        product(
            (None, {}, {"eos_token_id": 7}, {"eos_token_id": [7, 9]}), (None, 2, [2, 7]), ("", CONTROL[0])
        )
    ),
)
def test_the_ends_of_all_files_are_one_set(
    generation: dict[str, Any] | None, config: int | list[int] | None, eos_token: str, tmp_path: Path
) -> None:
    _, tokenizer = checkpoint(tmp_path, generation=generation, eos_token=eos_token)
    edit_config(tmp_path, eos_token_id=config)
    expected = set()
    for value in ((generation or {}).get("eos_token_id"), config):
        expected |= set(value if isinstance(value, list) else [] if value is None else [value])
    expected |= {tokenizer.token_to_id(eos_token)} if eos_token else set()
    assert set(read_spec(tmp_path).eos_token_ids) == expected
    assert load_checkpoint(tmp_path).eos_token_ids == read_spec(tmp_path).eos_token_ids


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_grammar_ends_by_each_of_them(native: str, tmp_path: Path) -> None:
    _, tokenizer = checkpoint(tmp_path, generation={"eos_token_id": 7}, eos_token=CONTROL[0])
    edit_config(tmp_path, eos_token_id=[2])
    payload = llguidance.grammar_from("regex", "[ab]+").encode()
    grammar = GrammarSpec(digest="", payload=payload, backend="llguidance/1")
    ends = read_spec(tmp_path).eos_token_ids
    assert set(ends) == {7, 2, tokenizer.token_to_id(CONTROL[0])}
    with closing(open_runner(tmp_path, native=native)) as runner:
        for end in ends:
            sampling = SamplingParams(temperature=0.0, logit_bias={end: 1000.0}, max_tokens=32)
            (job,) = Driver(runner).run([Job([60, 61], num_tokens=32, sampling=sampling, grammar=grammar)])
            assert not job.failure
            assert job.grammar_finished
            assert job.output[-1] == end
            assert len(job.output) == 2, "one letter is needed, and then the end wins"


@pytest.mark.parametrize("speculation", ["off", "ngram", "suffix", "draft_model"])
@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kind", ["tied", "apart", "quantized"])
def test_padding_rows_are_never_drawn(kind: str, native: str, speculation: str, tmp_path: Path) -> None:
    oracle, tokenizer = checkpoint(tmp_path, tie_word_embeddings=kind == "tied")
    if kind == "quantized":
        writers.rewrite(tmp_path, oracle, SETTINGS, writers.gptq, head=True)
    count = tokenizer.get_vocab_size()
    assert count < ROWS
    settings = SpeculationConfig(method=speculation, draft_model=str(tmp_path), num_draft_tokens=3)
    if speculation == "draft_model" and kind == "quantized":
        pytest.skip("a draft model is not quantized")
    payload = llguidance.grammar_from("regex", "(?s:.)*").encode()
    grammar = GrammarSpec(digest="", payload=payload, backend="llguidance/1")
    jobs = [
        Job(
            prompt_of(20, count, seed),
            num_tokens=20,
            sampling=SamplingParams(
                temperature=5.0, seed=seed, max_tokens=32, logprobs=20, prompt_logprobs=ROWS
            ),
            speculate=speculation != "off",
            grammar=grammar if seed % 2 else None,
        )
        for seed in range(8)
    ]
    with closing(open_runner(tmp_path, native=native, speculation=settings)) as runner:
        Driver(runner).run(jobs)
    for job in jobs:
        assert not job.failure
        assert max(job.output) < count
        for entry in (*job.logprobs, *job.prompt_logprobs):
            assert max(entry.top_ids) < count
    expected = torch.log_softmax(reference_logits(oracle, jobs[0].prompt)[:, :count], -1)
    for position, entry in enumerate(jobs[0].prompt_logprobs):
        assert len(entry.top_ids) == count
        ours = torch.empty(count)
        ours[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
        torch.testing.assert_close(ours, expected[position], atol=1e-3, rtol=0)


def with_holes(folder: Path, tokenizer: Tokenizer, num_holes: int) -> list[int]:
    """Writes the tokenizer without its last merges and what they make: ids that no token has then."""
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    # They are tokens of the model as well, so that they keep their ids.
    model["vocab"] |= {each["content"]: each["id"] for each in description["added_tokens"]}
    holes = []
    for _ in range(num_holes):
        merge = model["merges"].pop()
        made = "".join(merge if isinstance(merge, list) else merge.split(" "))
        holes.append(model["vocab"].pop(made))
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return sorted(holes)


@pytest.mark.parametrize("speculation", ["off", "draft_model"])
@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kind", ["tied", "apart", "quantized", "capped"])
def test_ids_without_a_token_are_never_drawn(
    kind: str, native: str, speculation: str, tmp_path: Path
) -> None:
    tokenizer = byte_level(CONTROL)
    count = tokenizer.get_vocab_size()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": ROWS if kind == "quantized" else count}
    if kind == "capped":
        oracle = make_checkpoint(tmp_path, "gemma2", **sizes, final_logit_softcapping=5.0)
    else:
        oracle = make_checkpoint(tmp_path, "llama", **sizes, tie_word_embeddings=kind == "tied")
    write(tmp_path, tokenizer)
    if kind == "quantized":
        writers.rewrite(tmp_path, oracle, SETTINGS, writers.gptq, head=True)
    holes = with_holes(tmp_path, tokenizer, 40)
    assert read_spec(tmp_path).holes == tuple(holes)
    assert read_spec(tmp_path).vocab_size == count
    if speculation == "draft_model" and kind == "quantized":
        pytest.skip("a draft model is not quantized")
    settings = SpeculationConfig(method=speculation, draft_model=str(tmp_path), num_draft_tokens=3)
    wanted = dict.fromkeys(holes, 100.0)
    jobs = [
        Job(
            prompt_of(20, count, seed),
            num_tokens=20,
            sampling=SamplingParams(
                temperature=0.0 if seed == 1 else 5.0,
                seed=seed,
                max_tokens=32,
                logprobs=20,
                prompt_logprobs=20,
                logit_bias=wanted if seed < 2 else {},
            ),
            speculate=speculation != "off",
        )
        for seed in range(6)
    ]
    with closing(open_runner(tmp_path, native=native, speculation=settings)) as runner:
        Driver(runner).run(jobs)
    for job in jobs:
        assert not job.failure
        assert not {*holes} & {*job.output}
        for entry in (*job.logprobs, *job.prompt_logprobs):
            assert not {*holes} & {*entry.top_ids}


def test_an_end_that_the_tokenizer_lacks_is_no_hole(tmp_path: Path) -> None:
    _, tokenizer = checkpoint(tmp_path)
    holes = with_holes(tmp_path, tokenizer, 3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": holes[1]}))
    spec = read_spec(tmp_path)
    assert spec.holes == (holes[0], holes[2])
    assert holes[1] in spec.eos_token_ids


def test_a_prompt_of_padding_is_refused(tmp_path: Path) -> None:
    _, tokenizer = checkpoint(tmp_path)
    count = tokenizer.get_vocab_size()
    with closing(open_runner(tmp_path)) as runner:
        (job,) = Driver(runner).run([Job([count - 1, count])])
    assert f"token id {count} is outside the vocabulary of {count} tokens" in job.failure


def test_more_ids_than_rows_are_refused_with_both_numbers(tmp_path: Path) -> None:
    _, tokenizer = checkpoint(tmp_path, vocab_size=400)
    count = tokenizer.get_vocab_size()
    # The control tokens are the last ones.
    with pytest.raises(CheckpointError, match=rf"tokenizer has {count - 3} ids, .* only 400 rows"):
        read_spec(tmp_path)


def test_special_tokens_beyond_the_rows_are_left_alone(tmp_path: Path) -> None:
    """Text models of multimodal families come so: their tokenizer names an image that they cannot read."""
    tokenizer = byte_level(CONTROL)
    rows = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    make_checkpoint(tmp_path, "llama", vocab_size=rows)
    write(tmp_path, tokenizer)
    assert read_spec(tmp_path).vocab_size == rows
    write(tmp_path, tokenizer, config={"eos_token": "<image>"})
    with pytest.raises(ConfigError, match=rf"eos_token_id {rows} is beyond the model's {rows} rows"):
        read_spec(tmp_path)


def test_a_head_without_padding_is_whole(tmp_path: Path) -> None:
    tokenizer = byte_level(CONTROL)
    make_checkpoint(tmp_path, "llama", vocab_size=tokenizer.get_vocab_size())
    write(tmp_path, tokenizer)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape"):
        open_runner(tmp_path)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"-4": {"content": "a"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": "a"}}'),
        ("tokenizer_config.json", DEEP),
        ("generation_config.json", DEEP),
        ("config.json", DEEP),
        ("config.json", ""),
    ],
    ids=lambda value: value[:50],
)
def test_what_no_file_can_say_of_a_checkpoint_is_refused_by_its_name(
    name: str, text: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path)
    if name == "config.json" and not text:
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_spec(tmp_path)
    if name != "config.json":
        with pytest.raises(ConfigError, match=name):
            load_checkpoint(tmp_path)


@pytest.mark.parametrize("config", [{"added_tokens_decoder": None}, {"eos_token": ["a"]}])
def test_what_says_nothing_of_the_ends_is_passed_over(config: dict[str, Any], tmp_path: Path) -> None:
    _, tokenizer = checkpoint(tmp_path, generation={"eos_token_id": 7})
    write(tmp_path, tokenizer, config=config, generation={"eos_token_id": 7})
    assert read_spec(tmp_path).eos_token_ids == load_checkpoint(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize("named", [CONTROL[1], {"content": CONTROL[1]}], ids=["text", "token"])
@pytest.mark.parametrize("declared", [None, CONTROL[0]])
@pytest.mark.parametrize("is_newer", [False, True])
def test_the_file_of_special_tokens_is_read_as_transformers_reads_it(
    is_newer: bool, declared: str | None, named: Any, tmp_path: Path
) -> None:
    _, tokenizer = checkpoint(tmp_path)
    added = {str(tokenizer.token_to_id(each)): {"content": each, "special": True} for each in CONTROL}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"added_tokens_decoder": added} if is_newer else {}
    write(tmp_path, tokenizer, config=config | ({"eos_token": declared} if declared else {}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": named}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    ends = () if theirs is None else (theirs,)
    assert read_spec(tmp_path).eos_token_ids == load_checkpoint(tmp_path).eos_token_ids == ends
