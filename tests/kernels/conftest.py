"""One thread of torch's for each process of tests: more than are free would only get in each other's way."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
