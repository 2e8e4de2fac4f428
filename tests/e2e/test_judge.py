"""The bundled judge of steps over the real stack: it scores as any model, and steps are kept by it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.ledger.tables import REQUESTS, open_ledger
from models.judge.evaluate import JUDGE, area_within
from models.judge.network import judging_tokenizer, open_judge, scores
from models.judge.solutions import ArithmeticProblem, graded, held_out
from services.supervisor.config import BUNDLED_MODEL
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, LIMIT_S, Stack, eventually, running_stack

pytestmark = [pytest.mark.e2e, needs_weights]

SAMPLES = 8
JUDGED = {"type": "model", "model": "judge"}
MODELS = f"""
{CONFIG}
[tiers.standard.test_time]
[models.nano]
path = "{BUNDLED_MODEL}"
[models.judge]
path = "{JUDGE}"
"""
# Differences, in which the bundled model errs most: at temperature 1 more than half of its answers are wrong.
QUESTIONS = [problem for problem in map(held_out, range(0, 320, 2)) if problem.steps[0].startswith("Ones:")][
    :24
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with the bundled model and its judge."""
    folder = tmp_path_factory.mktemp("judged")
    with running_stack(folder, "--engines", "2", config=MODELS, model=None) as stack:
        yield stack
        stack.assert_nothing_leaked()


def post(stack: Stack, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    answer = httpx.post(f"{stack.url}{path}", json=body, headers=headers, timeout=LIMIT_S, trust_env=False)
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer


def ask(stack: Stack, problem: ArithmeticProblem, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": problem.question}]
    fixed = {"model": "nano", "messages": messages, "max_tokens": 64, "temperature": 1.0, "seed": 7}
    return post(stack, "/v1/chat/completions", **fixed, **fields)


def score(stack: Stack, question: str, texts: list[str]) -> list[float]:
    answer = post(stack, "/v1/score", model="judge", text_1=question, text_2=texts)
    return [each["score"] for each in sorted(answer.json()["data"], key=lambda each: each["index"])]


def texts_of(answer: httpx.Response) -> list[str]:
    return [each["message"]["content"] for each in answer.json()["choices"]]


def is_right(problem: ArithmeticProblem, text: str) -> bool:
    return graded(problem, text).is_right


def each_of(asked: Any) -> list[Any]:
    """What comes of all questions, some at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(asked, QUESTIONS))


def test_its_scores_are_those_of_its_weights_and_tell_right_from_wrong(judged: Stack) -> None:
    drawn = each_of(lambda problem: texts_of(ask(judged, problem, n=SAMPLES)))
    found = [score(judged, each.question, texts) for each, texts in zip(QUESTIONS, drawn, strict=True)]
    judge, tokenizer = open_judge(JUDGE), judging_tokenizer(BUNDLED_MODEL)
    groups: list[tuple[list[float], list[float]]] = []
    for problem, texts, given in zip(QUESTIONS, drawn, found, strict=True):
        own = scores(judge, tokenizer, [(problem.question, text) for text in texts])
        # An engine's products are narrower than float32 where a processor multiplies so.
        assert given == pytest.approx(own, abs=0.05)
        groups.append(([], []))
        for text, value in zip(texts, given, strict=True):
            groups[-1][not is_right(problem, text)].append(value)
    assert sum(len(right) for right, _ in groups) > 20
    assert sum(len(wrong) for _, wrong in groups) > 20
    # Of one question: how hard it is tells nothing.
    within = area_within(groups)
    assert within > 0.6


def test_steps_so_far_are_judged_as_they_stand(judged: Stack) -> None:
    right = QUESTIONS[0]
    first, second, last = right.steps
    texts = [f"{first}\n", f"{first}\n{second}\n", f"{first}\n{second}\n{last}"]
    wrong = [text.replace(" = ", " = 1", 1) for text in texts]
    assert min(score(judged, right.question, texts)) > max(score(judged, right.question, wrong))


def test_a_search_under_it_is_right_as_often_as_a_sample_or_more_and_tells_of_scores(judged: Stack) -> None:
    plain = each_of(lambda problem: texts_of(ask(judged, problem))[0])
    asked = {"strategy": "search", "samples": SAMPLES, "scorer": JUDGED}
    answers = each_of(lambda problem: ask(judged, problem, test_time=asked))
    num_right = 0
    for problem, answer in zip(QUESTIONS, answers, strict=True):
        told, (text,) = answer.json()["usage"]["test_time"], texts_of(answer)
        num_right += is_right(problem, text)
        chosen = next(each for each in told["samples"] if each["outcome"] == "chosen")
        (given,) = score(judged, problem.question, [text])
        assert chosen["score"] == pytest.approx(given, abs=1e-3)
        assert len(told["samples"]) % SAMPLES == 0
        assert told["scorer_tokens"] > 0
    num_plain = sum(map(is_right, QUESTIONS, plain))
    assert num_right >= num_plain
    # What it has read is a row of its own model.
    request_id = answers[0].headers["x-request-id"]

    def models() -> set[str]:
        with open_ledger(f"sqlite:///{judged.directory}/ledger.sqlite").connect() as connection:
            of_request = select(REQUESTS.c.model).where(REQUESTS.c.request_id == request_id)
            return set(connection.execute(of_request).scalars())

    assert eventually(lambda: models() == {"nano", "judge"})


def test_the_best_of_samples_is_the_one_that_it_scores_best(judged: Stack) -> None:
    problem, asked = QUESTIONS[1], {"strategy": "best_of", "samples": SAMPLES, "scorer": JUDGED}
    answer = ask(judged, problem, test_time=asked)
    texts = texts_of(ask(judged, problem, n=SAMPLES))
    given = [each["score"] for each in answer.json()["usage"]["test_time"]["samples"]]
    assert given == pytest.approx(score(judged, problem.question, texts), abs=1e-3)
    assert texts_of(answer) == [texts[given.index(max(given))]]
