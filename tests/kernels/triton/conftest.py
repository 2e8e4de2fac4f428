"""Triton's interpreter runs the kernels on the CPU. It is chosen when a kernel is defined, so before any
import.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from engine.kernels.interpreter import round_as_hardware_does

round_as_hardware_does()
