"""Budgets of thoughts over the three APIs where a family writes them in its own form: the real services over
a model whose every token says which one comes next, and which never ends a thought by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.e2e.stack import Stack, running_stack
from tests.unit.tokenizer_svc.checkpoints import byte_level, write
from tests.unit.tokenizer_svc.families import MORE

_TEMPLATES = Path(__file__).parents[1] / "unit/tokenizer_svc/templates"
# Of each family: what opens a thought behind the prompt's last token, and its words that are one token here.
OPENINGS = {
    "harmony": ("assistant", ("<|channel|>", "analysis", "<|message|>"), ("assistant", "analysis", "final")),
    "gemma4": ("model\n", ("<|channel>", "thought\n"), ("model\n", "thought\n")),
}
_WORDS = "bcdfghjkmnpqvwxz"
_WIDTH = 512
# Of the token that comes next: no draw takes another.
_LOGIT = 80.0
_REQUESTS = 70


def _next_of(tokenizer: Tokenizer, family: str) -> dict[int, int]:
    """Which token comes next: an opening, and then words in a circle, as behind what is forced."""
    last, opening, _ = OPENINGS[family]
    vocabulary = tokenizer.get_vocab()
    chain = [vocabulary[each] for each in (last, *opening, *_WORDS, _WORDS[0])]
    return dict.fromkeys(range(tokenizer.get_vocab_size()), chain[-1]) | dict(pairwise(chain))


def _write_weights(folder: Path, tokenizer: Tokenizer, following: dict[int, int]) -> None:
    """A Llama whose layer adds nothing, and whose head knows each token by its embedding."""
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=_WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (config.vocab_size, _WIDTH))
    head = np.zeros_like(signs)
    for token, after in following.items():
        head[after] += signs[token] * (_LOGIT / _WIDTH)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.tensor(signs))
        model.lm_head.weight.copy_(torch.tensor(head))
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=sorted(OPENINGS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    name: str = request.param
    control, markup = MORE[name]
    tokenizer = byte_level(control, (*markup, *OPENINGS[name][2]))
    template = (_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    # As published ones say how long to think.
    template = template.replace("# Valid", "Reasoning: ' + (reasoning_effort or 'medium') + '\\n# Valid")
    folder = write(
        tmp_path_factory.mktemp(name) / name, tokenizer, template, config={"eos_token": control[-1]}
    )
    _write_weights(folder, tokenizer, _next_of(tokenizer, name))
    with running_stack(tmp_path_factory.mktemp("stack"), model=folder) as stack:
        yield stack
        stack.assert_nothing_leaked()


def _asked(stack: Stack, draw: random.Random) -> tuple[str, dict[str, Any], int, int]:
    """A request of one of the APIs: its path, body, budget, and how many tokens it may take."""
    budget, question = draw.randint(8, 40), f"What is {draw.randint(1, 99)} plus {draw.randint(1, 99)}?"
    most = budget + draw.randint(20, 40)
    said = [{"role": "user", "content": question}]
    sampling = {"model": stack.model, "temperature": draw.choice([0.0, 0.7, 1.0])}
    chat = {"messages": said, "max_tokens": most, "reasoning_effort": "high", "max_thinking_tokens": budget}
    responses = {
        "input": question,
        "max_output_tokens": most,
        "reasoning": {"effort": "high"},
        "max_thinking_tokens": budget,
    }
    messages = {
        "messages": said,
        "max_tokens": most,
        "thinking": {"type": "enabled", "budget_tokens": budget},
    }
    path, body = draw.choice([("chat/completions", chat), ("responses", responses), ("messages", messages)])
    return f"/v1/{path}", sampling | body, budget, most


def _thought_and_text(path: str, answer: dict[str, Any]) -> tuple[int, int, str, str]:
    """Tokens of the thought, of all; what was thought, and what was said."""
    usage = answer["usage"]
    if path.endswith("completions"):
        message = answer["choices"][0]["message"]
        thinking = usage["completion_tokens_details"]["reasoning_tokens"]
        return thinking, usage["completion_tokens"], message["reasoning_content"], message["content"]
    if path.endswith("responses"):
        thinking = usage["output_tokens_details"]["reasoning_tokens"]
        kinds = {each["type"]: each for each in answer["output"]}
        thought = "".join(part["text"] for part in kinds["reasoning"]["content"])
        return thinking, usage["output_tokens"], thought, kinds["message"]["content"][0]["text"]
    blocks = {each["type"]: each for each in answer["content"]}
    thinking = usage["output_tokens_details"]["thinking_tokens"]
    return thinking, usage["output_tokens"], blocks["thinking"]["thinking"], blocks["text"]["text"]


def test_mixed_budgets_hold_in_the_family_s_own_form(family: Stack) -> None:
    draw, found = random.Random(1), []
    with httpx.Client(
        base_url=family.url, headers={"authorization": f"Bearer {family.state.api_key}"}, timeout=120
    ) as client:
        for _ in range(_REQUESTS):
            path, body, budget, most = _asked(family, draw)
            answer = client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            thinking, total, thought, text = _thought_and_text(path, answer.json())
            assert 0 < thinking <= budget, (path, body, answer.text)
            assert total == most, "nothing ends the answer but its room"
            _are_words(thought)
            _are_words(text)
            found.append((path, thinking, budget))
    assert {path for path, _, _ in found} == {"/v1/chat/completions", "/v1/responses", "/v1/messages"}


def _are_words(text: str) -> None:
    """Nothing of the family's marks is in a text, and no part is empty."""
    assert text.strip()
    assert set(text.strip()) <= set(_WORDS), text
