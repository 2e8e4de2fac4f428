"""What the recipes share: conversations of a JSONL file as batches, and a loop that learns from them."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

# Of targets that are not learned: prompts and padding.
IGNORED = -100
ROWS_TOGETHER = 8
_WARM_UP_STEPS = 20


@dataclass(frozen=True)
class LessonBatch:
    """ids and targets, both int64 [B, T]; a target is the id itself, IGNORED where nothing is learned."""

    ids: Tensor
    targets: Tensor


# The mean loss of a batch.
Loss: TypeAlias = Callable[[nn.Module, LessonBatch], Tensor]


def open_model(folder: Path) -> tuple[Any, Any]:
    """Model in float32, and tokenizer, of a folder in Hugging Face format."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def save_model(model: Any, source: Path, out: Path) -> None:
    """The model in bfloat16, with the tokenizer's files of its source."""
    model.to(torch.bfloat16).save_pretrained(out)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".model") and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)


def read_lessons(path: Path, tokenizer: Any, max_tokens: int) -> list[tuple[list[int], int]]:
    """Ids of each conversation that fits, and how many of them are its prompt: what comes before the last
    message. Raises ValueError with the line's number.
    """
    lessons = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            messages, tools = row["messages"], row.get("tools")
            before = tokenizer.apply_chat_template(
                messages[:-1], tools=tools, add_generation_prompt=True, tokenize=False
            )
            whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: no conversation with messages ({error})") from error
        # A template that renders an answer otherwise than it asks for one has no prompt to learn behind.
        if not whole.startswith(before):
            continue
        prompt = tokenizer(before, add_special_tokens=False).input_ids
        answer = tokenizer(whole[len(before) :], add_special_tokens=False).input_ids
        if len(prompt) + len(answer) <= max_tokens:
            lessons.append((prompt + answer, len(prompt)))
    if not lessons:
        raise ValueError(f"{path}: none of its conversations fits in {max_tokens} tokens (--max-tokens)")
    return lessons


def batches(lessons: list[tuple[list[int], int]], padding: int, seed: int = 0) -> Iterator[LessonBatch]:
    """Endless batches; each is of lessons of like lengths."""
    draw = random.Random(seed)
    ordered = sorted(lessons, key=lambda lesson: len(lesson[0]))
    groups = [ordered[begin : begin + ROWS_TOGETHER] for begin in range(0, len(ordered), ROWS_TOGETHER)]
    while True:
        for group in draw.sample(groups, len(groups)):
            length = max(len(ids) for ids, _ in group)
            ids = torch.full((len(group), length), padding)
            targets = torch.full((len(group), length), IGNORED)
            for row, (tokens, num_prompt) in enumerate(group):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                targets[row, num_prompt : len(tokens)] = ids[row, num_prompt : len(tokens)]
            yield LessonBatch(ids, targets)


def answer_loss(model: nn.Module, batch: LessonBatch) -> Tensor:
    """Cross-entropy of the answers' tokens."""
    logits = model(batch.ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch.targets[:, 1:].flatten(), ignore_index=IGNORED)


@dataclass(frozen=True, kw_only=True)
class Course:
    """What is learned from, and for how long. No steps is no training."""

    # JSON lines with `messages`, and `tools`.
    data: Path
    steps: int = 300
    rate: float = 2e-4
    # Longer conversations are left out.
    max_tokens: int = 512


def fine_tune(model: Any, tokenizer: Any, course: Course, loss: Loss = answer_loss) -> None:
    """AdamW with warm-up and linear decay, in bfloat16 where torch thinks it safe."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    source = batches(read_lessons(course.data, tokenizer, course.max_tokens), padding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=course.rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / _WARM_UP_STEPS, 1.0) * (1 - step / max(1, course.steps))
    )
    model.train()
    for _ in track(range(course.steps), "training"):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, next(source))
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def options(text: str | None) -> argparse.ArgumentParser:
    """The options that recipes share: the model, where the result goes, and the course."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder in Hugging Face format")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with `messages`, and `tools`")
    parser.add_argument("--steps", type=int, default=Course.steps)
    parser.add_argument("--rate", type=float, default=Course.rate, help="learning rate")
    parser.add_argument("--max-tokens", type=int, default=Course.max_tokens, help="longer ones are left out")
    return parser


def course_of(given: argparse.Namespace) -> Course:
    """The course that these options ask for."""
    return Course(data=given.data, steps=given.steps, rate=given.rate, max_tokens=given.max_tokens)
