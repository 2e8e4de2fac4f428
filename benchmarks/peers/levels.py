"""Charges peers to the level of instructions that ours is forced to (NATIVE_KERNELS_LEVEL).

oneDNN, torch and MKL take a limit from the environment, and llama.cpp is built for a level. What a peer
chooses by the processor itself cannot be held: `NOT_HELD` says so, and tables repeat it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.native.config import forced_level


@dataclass(frozen=True, kw_only=True)
class Held:
    """How a level is called elsewhere."""

    onednn: str
    torch: str
    mkl: str
    # Of llama.cpp's build, beside AVX2, which it takes unless it is told otherwise.
    ggml: tuple[str, ...] = ()

    def variables(self) -> Mapping[str, str]:
        """For a process that multiplies by oneDNN, torch or MKL."""
        return {
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "ATEN_CPU_CAPABILITY": self.torch,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


_AVX512 = ("AVX512", "AVX512_VNNI")
HELD = {
    "avx2": Held(onednn="AVX2", torch="avx2", mkl="AVX2"),
    "avx2_vnni": Held(onednn="AVX2_VNNI", torch="avx2", mkl="AVX2", ggml=("AVX_VNNI",)),
    "avx512": Held(onednn="AVX512_CORE_VNNI", torch="avx512", mkl="AVX512", ggml=_AVX512),
    "avx512_bf16": Held(
        onednn="AVX512_CORE_BF16",
        torch="avx512",
        mkl="AVX512",
        ggml=(*_AVX512, "AVX512_VBMI", "AVX512_BF16"),
    ),
}
# Of peers, by the part of their names before a dash: what takes the processor's best whatever the level.
NOT_HELD = {
    "openvino": "attention and what is not oneDNN's",
    "vllm": "its own kernels",
}


def held() -> Held | None:
    """How peers are held, or None where no level is forced that they can be held to."""
    return HELD.get(forced_level())


def held_variables() -> Mapping[str, str]:
    """Variables of a peer's process; none where nothing is forced."""
    found = held()
    return found.variables() if found else {}


def hold_this_process() -> None:
    """Charges torch here; to be called before its first product."""
    os.environ.update(held_variables())


def explanation(peers: list[str]) -> str:
    """What holds the peers of a comparison, and what does not; empty where no level is forced."""
    level = forced_level()
    if not level:
        return ""
    if level not in HELD:
        return f"Ours is held to {level}; nothing holds the peers, which take the processor's best."
    free = [f"{name}'s {NOT_HELD[name]}" for name in NOT_HELD if any(p.startswith(name) for p in peers)]
    said = f"Ours is held to {level}, peers by ONEDNN_MAX_CPU_ISA={HELD[level].onednn} or their build"
    return f"{said}; nothing holds {' and '.join(free)}." if free else f"{said}."
