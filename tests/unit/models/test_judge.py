"""The judge of steps: its lessons are labelled rightly and apart from its measures, its folder is what
transformers writes, and it tells right steps from wrong ones that it has not seen.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from models.corpus import Draw
from models.judge.evaluate import BASE, JUDGE, area, area_within
from models.judge.network import StepJudge, export_judge, judging_tokenizer, open_judge, scores
from models.judge.sampling import drawn
from models.judge.solutions import (
    DELIMITER,
    NUM_HELD_OUT,
    ArithmeticProblem,
    graded,
    held_out,
    problems,
    slipped,
    solved,
)
from models.judge.train import batch_of, batches_of, guess_loss, label_loss, lessons_of, train

SUM = ArithmeticProblem(
    "What is 47 + 85?",
    ("Ones: 7 + 5 = 12, write 2, carry 1.", "Tens: 4 + 8 + 1 = 13.", "The answer is 132."),
)
SUM_TEXT = DELIMITER.join(SUM.steps)
MB = 1_000_000


def test_a_step_is_right_where_all_before_it_are() -> None:
    ones, tens, answer = SUM.steps
    wrong = "Tens: 4 + 8 + 1 = 12."
    assert graded(SUM, f"{ones}\n{wrong}\n{answer}").num_right_characters == len(f"{ones}\n{wrong}") - 2
    assert graded(SUM, f"{ones}\n{tens}\n{answer}").are_right == (True, True, True)
    assert graded(SUM, f"{ones}\n{wrong}\n{answer}").are_right == (True, False, False)
    assert graded(SUM, f"{ones}\n{wrong}\nThe answer is 122.").are_right == (True, False, False)
    # What stops too early, or goes on for too long, is no right answer.
    assert graded(SUM, f"{ones}\n{tens}\n").are_right == (True, False)
    assert graded(SUM, f"{ones}\n{tens}\n{answer}\n{answer}").are_right == (True, True, True, False)
    assert not graded(SUM, "").is_right


def test_no_question_that_is_measured_is_trained_but_for_closed_tables() -> None:
    asked = [held_out(number) for number in range(NUM_HELD_OUT)]
    keys = {each.key for each in asked}
    # However it is worded.
    assert SUM.key == ArithmeticProblem("Add 85 and 47.", SUM.steps).key
    trained = list(islice(problems(Draw(3)), 5_000))
    assert {each.key for each in trained} & keys <= {""}
    by_heart = [each for each in trained if not each.key]
    assert 0 < len(by_heart) < len(trained) / 4
    assert all(len(each.steps) == 1 for each in by_heart)


def test_the_same_seed_gives_the_same_lessons() -> None:
    drawn = [solved(SUM), graded(SUM, "The answer is 132.")]
    one, same, other = (list(islice(lessons_of(Draw(seed), drawn), 300)) for seed in (4, 4, 5))
    assert one == same
    assert one != other
    share = sum(each.is_right for each in one) / len(one)
    assert 0.4 < share < 0.6


def test_a_slip_is_never_right_and_often_followed() -> None:
    draw = Draw(6)
    found = [(problem, slipped(draw, problem)) for problem in islice(problems(draw), 1_000)]
    assert not any(slip.is_right for _, slip in found)
    assert {sum(slip.are_right) for _, slip in found} == {0, 1, 2}
    followed = [slip for problem, slip in found if sum(map(str.__ne__, slip.steps, problem.steps)) > 1]
    assert len(followed) > 100


def test_a_batch_has_a_label_for_each_token_from_the_first_wrong_one_on() -> None:
    tokenizer = judging_tokenizer(BASE)
    text = "Ones: 7 + 5 = 12, write 2, carry 1.\nTens: 4 + 8 + 1 = 12."
    batch = batch_of(tokenizer, Draw(7), [graded(SUM, text), solved(SUM)] * 20)
    assert batch.weights.sum() == pytest.approx(1.0)
    flat = batch.ids.flatten()
    labels = torch.full_like(flat, -1)
    labels[batch.selected] = batch.labels.long()
    seen = set()
    for ids, row in zip(batch.ids.tolist(), labels.reshape(batch.ids.shape).tolist(), strict=True):
        begin = row.index(next(label for label in row if label >= 0))
        said = [index for index, label in zip(ids, row, strict=True) if label >= 0]
        assert begin == len(tokenizer.encode(SUM.question, "").ids)
        good = tokenizer.decode([index for index, label in zip(ids, row, strict=True) if label == 1])
        whole = tokenizer.decode(said)
        assert SUM_TEXT.startswith(good)
        assert good == whole or not SUM_TEXT.startswith(whole)
        seen.add((good == whole, whole.endswith("\n")))
    # Some are whole, others end with a step, or behind it.
    assert seen == {(True, True), (True, False), (False, False)}


def test_a_pair_is_read_as_the_chat_that_it_is() -> None:
    tokenizer = Tokenizer.from_file(str(JUDGE / "tokenizer.json"))
    chat = transformers.AutoTokenizer.from_pretrained(BASE)
    asked = [{"role": "user", "content": SUM.question}]
    prompt = chat.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    steps = DELIMITER.join(SUM.steps[:2]) + DELIMITER
    assert tokenizer.encode(SUM.question, steps).ids == chat(prompt + steps).input_ids
    assert tokenizer.to_str() == judging_tokenizer(BASE).to_str()


def test_solutions_that_are_kept_are_not_drawn_again(tmp_path: Path) -> None:
    kept = tmp_path / "work" / "solutions.jsonl"
    first = drawn([SUM], kept, each=2, seed=1)
    assert [each.question for each in first] == [SUM.question] * 2
    assert kept.read_text() == json.dumps([each.text for each in first]) + "\n"
    kept.write_text(json.dumps([SUM.steps[0], "7!"]) + "\n")
    assert drawn([SUM], kept, each=2, seed=1) == [graded(SUM, SUM.steps[0]), graded(SUM, "7!")]


def test_areas_count_pairs_and_halves() -> None:
    assert area([0.9, 0.8], [0.1, 0.2]) == 1.0
    assert area([0.1], [0.9]) == 0.0
    assert area([0.5, 0.5], [0.5]) == 0.5
    assert area([0.9, 0.1], [0.5]) == 0.5
    # Questions without both tell nothing, and the others weigh by their pairs.
    assert area_within([([0.9], []), ([0.9], [0.1, 0.2]), ([0.1], [0.2])]) == pytest.approx(2 / 3)


def test_training_learns_and_what_is_exported_is_what_transformers_reads(tmp_path: Path) -> None:
    torch.manual_seed(1)
    judge, tokenizer = StepJudge(), judging_tokenizer(BASE)
    judge.begin_from(BASE.with_name("millrace-nano-draft"))
    right, wrong = solved(SUM), graded(SUM, "Ones: 7 + 5 = 13, write 3, carry 1.\nTens: 4 + 8 + 1 = 13.")
    pairs = [(each.question, DELIMITER.join(each.steps)) for each in (right, wrong)]
    assert scores(judge, tokenizer, pairs) == [0.5, 0.5]
    batches = batches_of(tokenizer, Draw(10), (each for _ in range(10_000) for each in (right, wrong)))
    train(judge, batches, guess_loss, 2)
    judge.keep_predicting()
    before = judge.network.model.embed_tokens.weight.clone()
    train(judge, batches, label_loss, 12)
    assert torch.equal(judge.network.model.embed_tokens.weight, before)
    export_judge(judge, tokenizer, tmp_path)
    found = scores(open_judge(tmp_path), tokenizer, pairs)
    assert found[0] > found[1]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    for pair, score in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([tokenizer.encode(*pair).ids])).logits
        assert logits.sigmoid().item() == pytest.approx(score, abs=1e-5)


def test_the_committed_judge_is_small_and_knows_slips_in_questions_it_has_not_seen() -> None:
    assert sum(path.stat().st_size for path in JUDGE.iterdir()) <= 4 * MB
    judge, tokenizer = open_judge(JUDGE), judging_tokenizer(BASE)
    draw = Draw(9, "eval")
    asked = [held_out(number) for number in range(200)]
    lessons = [solved(each) for each in asked], [slipped(draw, each) for each in asked]
    right, wrong = (
        scores(judge, tokenizer, [(each.question, DELIMITER.join(each.steps)) for each in some])
        for some in lessons
    )
    assert area(right, wrong) > LEAST_AREA


LEAST_AREA = 0.6
