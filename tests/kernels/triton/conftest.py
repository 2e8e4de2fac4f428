"""Triton's interpreter runs the kernels on the CPU. It is chosen when a kernel is defined, so before any
import.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from kernels.interpreter import add_in_one_order, prepare_the_language_once, round_as_hardware_does

round_as_hardware_does()
add_in_one_order()
prepare_the_language_once()
