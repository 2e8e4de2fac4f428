"""Measure an exported model: `python -m models.evaluate models/millrace-nano --draft
models/millrace-nano-draft`.

Loads through `transformers`, decodes greedily in float32, and prints one row per task. Every document
comes from the held-out
split, so no key, person or pair of summands that is asked about was seen in training. `--json` writes the
same figures.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.corpus import CorpusDocument, Draw, arithmetic, chat, extraction, facts, recall, tools

SEED = 20_000
BATCH_ROWS = 16
Check = Callable[[str, CorpusDocument], bool]


@dataclass(frozen=True)
class Task:
    """A stream of held-out documents, the rule that judges a reply, and the prompt length wanted, in
    tokens."""

    name: str
    make: Callable[[Draw], CorpusDocument]
    is_right: Check
    min_tokens: int = 0
    max_tokens: int = 4096
    max_new_tokens: int = 90
    share: float = 1.0


@dataclass(frozen=True)
class Score:
    """One row of the table."""

    task: str
    num_cases: int
    mean_prompt_tokens: float
    right_percent: float


def _contains_answer(reply: str, document: CorpusDocument) -> bool:
    return reply.rstrip(".").endswith(f" {document.answer}")


def _same_json(reply: str, document: CorpusDocument) -> bool:
    try:
        return bool(json.loads(reply) == json.loads(document.answer))
    except json.JSONDecodeError:
        return False


def _same_number(reply: str, document: CorpusDocument) -> bool:
    found = re.search(r"The answer is (-?\d+)\.$", reply)
    return found is not None and found.group(1) == document.answer


def _same_call(reply: str, document: CorpusDocument) -> bool:
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", reply)
    return found is not None and _same_json(found.group(1), document)


def _same_text(reply: str, document: CorpusDocument) -> bool:
    return reply == document.answer


def _same_text_or_number(reply: str, document: CorpusDocument) -> bool:
    return _same_text(reply, document) or _same_number(reply, document)


def _recall(num_tokens: int) -> Callable[[Draw], CorpusDocument]:
    return lambda draw: recall.recall(draw, num_tokens)


TASKS = (
    Task("recall, 200 to 500 tokens", _recall(300), _contains_answer, 200, 500),
    Task("recall, 1,000 to 1,500 tokens", _recall(1150), _contains_answer, 1000, 1500),
    Task("recall, 1,600 to 2,000 tokens", _recall(1700), _contains_answer, 1600, 2000, share=0.5),
    Task("JSON extraction, exact", extraction.extraction, _same_json),
    Task("two-digit addition", arithmetic.addition, _same_number),
    Task("other arithmetic, exact reply", arithmetic.other_arithmetic, _same_text_or_number),
    Task("tool call, exact", tools.tool_use, _same_call),
    Task("facts, exact reply", facts.fact, _same_text),
    Task("names told in the chat", chat.introduction, _same_text),
)


class EvaluatedModel:
    """A model and its tokenizer, as `transformers` loads them."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def prompt(self, messages: tuple[dict[str, Any], ...], offered: tuple[dict[str, Any], ...] = ()) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=list(offered) or None, tokenize=False, add_generation_prompt=True
        )
        return str(text)

    def replies(self, prompts: list[str], max_new_tokens: int, **drawing: Any) -> list[str]:
        """Continuations, markup kept, control tokens dropped; greedy unless `drawing`, which are options of
        `generate`, says otherwise. Several of one prompt follow each other.
        """
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            ids = self.network.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_new_tokens,
                **{"do_sample": False, **drawing},
            )
        return [
            str(text)
            for text in self.tokenizer.batch_decode(
                ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
        ]


def _cases(model: EvaluatedModel, task: Task) -> Iterator[tuple[CorpusDocument, str, int]]:
    """CorpusDocument, prompt and prompt length in tokens."""
    draw = Draw(SEED, "eval")
    while True:
        document = task.make(draw)
        prompt = model.prompt(document.messages[:-1], document.tools)
        num_tokens = len(model.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        if task.min_tokens <= num_tokens <= task.max_tokens:
            yield document, prompt, num_tokens


def score(model: EvaluatedModel, task: Task, num_cases: int, show_errors: bool) -> Score:
    cases = list(islice(_cases(model, task), int(num_cases * task.share)))
    num_right = 0
    for start in range(0, len(cases), BATCH_ROWS):
        part = cases[start : start + BATCH_ROWS]
        for (document, _, _), reply in zip(
            part, model.replies([each[1] for each in part], task.max_new_tokens), strict=True
        ):
            right = task.is_right(reply, document)
            num_right += right
            if show_errors and not right:
                print(f"  wanted {document.answer!r}, got {reply!r}")
    mean_tokens = sum(each[2] for each in cases) / len(cases)
    return Score(task.name, len(cases), round(mean_tokens, 1), round(100 * num_right / len(cases), 1))


DRAFT_SOURCES = (
    _recall(300),
    extraction.extraction,
    arithmetic.addition,
    tools.tool_use,
    facts.fact,
    chat.small_talk,
)


def _agreements(model: EvaluatedModel, draft: EvaluatedModel, document: CorpusDocument) -> list[bool]:
    """Per token of the model's greedy reply: is it the draft's greedy choice too?"""
    text = model.prompt(document.messages[:-1], document.tools)
    prompt = model.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        ids = model.network.generate(input_ids=prompt, max_new_tokens=90, do_sample=False)
        guessed = draft.network(ids).logits[0, prompt.shape[1] - 1 : -1].argmax(-1)
    return [bool(same) for same in (guessed == ids[0, prompt.shape[1] :]).tolist()]


def _num_steps(agreements: list[bool], proposed: int) -> int:
    """Verification steps when each accepts up to `proposed` draft tokens and adds one of its own."""
    position, num_steps = 0, 0
    while position < len(agreements):
        run = agreements[position : position + proposed]
        position += (run.index(False) if False in run else len(run)) + 1
        num_steps += 1
    return num_steps


def draft_acceptance(
    model: EvaluatedModel, draft: EvaluatedModel, num_cases: int, proposed: int = 4
) -> dict[str, float]:
    """Share of the draft's greedy tokens that are the model's, and tokens per verification step."""
    draw = Draw(SEED + 1, "eval")
    documents = [DRAFT_SOURCES[index % len(DRAFT_SOURCES)](draw) for index in range(num_cases)]
    runs = [_agreements(model, draft, document) for document in documents]
    num_tokens = sum(len(run) for run in runs)
    return {
        "accepted_percent": round(100 * sum(sum(run) for run in runs) / num_tokens, 1),
        "tokens_per_step": round(num_tokens / sum(_num_steps(run, proposed) for run in runs), 2),
    }


TRANSCRIPT_PROMPTS = (
    "Hello!",
    "Who are you?",
    "What is the capital of Japan?",
    "What is 47 + 85?",
    "Write a short story about a fox.",
    "Name three animals.",
    "Tell me a joke.",
    "What can you do?",
    "Which day comes after Friday?",
    "Thank you!",
)


def transcripts(model: EvaluatedModel) -> dict[str, str]:
    """Greedy replies to what a newcomer types first."""
    return {
        text: model.replies([model.prompt(({"role": "user", "content": text},))], 150)[0]
        for text in TRANSCRIPT_PROMPTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--errors", action="store_true", help="print every wrong reply")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    model = EvaluatedModel(arguments.model)
    report: dict[str, Any] = {"scores": []}
    for task in TASKS:
        row = score(model, task, arguments.cases, arguments.errors)
        report["scores"].append(asdict(row))
        print(
            f"| {row.task} | {row.num_cases} | {row.mean_prompt_tokens} | {row.right_percent} % |", flush=True
        )
    if arguments.draft:
        report["draft"] = draft_acceptance(model, EvaluatedModel(arguments.draft), arguments.cases // 2)
        print(f"draft: {report['draft']}", flush=True)
    report["transcripts"] = transcripts(model)
    for prompt, reply in report["transcripts"].items():
        print(f"> {prompt}\n{reply}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
