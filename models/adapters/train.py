"""Train an adapter of the bundled model in minutes: `python -m models.adapters.train pirate`.

A fixed number of steps from a fixed seed. What comes out is the folder that PEFT would write.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from models.adapters.lora import adapt, export_adapter
from models.adapters.tasks import TASKS, AdapterTask
from models.architecture import NANO, LanguageModel
from models.batches import batches
from models.checkpoint import import_weights
from models.tokenizer import load_tokenizer

BASE = Path(__file__).parents[1] / "millrace-nano"
FOLDER = BASE / "adapters"
RANK, ALPHA, RATE = 8, 16, 4e-3
SEQUENCE_LENGTH, NUM_ROWS, NUM_STEPS = 256, 6, 200


def train(model: LanguageModel, task: AdapterTask, num_steps: int, seed: int) -> None:
    """Trains an adapter of every linear layer; a line per 20 steps."""
    trained = adapt(model, rank=RANK, alpha=ALPHA)
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    source = batches(load_tokenizer(BASE), task.documents(seed), SEQUENCE_LENGTH, NUM_ROWS)
    started, smooth = time.monotonic(), 0.0
    for step in range(num_steps):
        batch = next(source)
        logits = model.logits(batch.ids, batch.selected)
        each = F.cross_entropy(logits, batch.targets, reduction="none")
        loss = (each * batch.weights).sum() / batch.weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 20, 1.0, (num_steps - step) / (0.6 * num_steps))
        optimizer.step()  # type: ignore[no-untyped-call]
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == 0 else 0.9 * smooth + 0.1 * loss.item()
        if step % 20 == 19:
            print(f"step {step + 1} loss {smooth:.4f} {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("adapter", choices=TASKS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--out", type=Path, help="folder of the adapter; else beside the bundled model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    task = TASKS[arguments.adapter]
    model = LanguageModel(NANO)
    import_weights(model, BASE)
    train(model, task, arguments.steps, arguments.seed)
    folder = arguments.out or FOLDER / arguments.adapter
    export_adapter(model, folder, base=BASE.name, rank=RANK, alpha=ALPHA)
    print(f"written: {folder}")


if __name__ == "__main__":
    main()
