"""The page's JavaScript by itself: runs the tests in page.test.mjs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_parts_of_the_page() -> None:
    assert NODE is not None
    script = Path(__file__).parent / "page.test.mjs"
    done = subprocess.run([NODE, "--test", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
