"""Makes engines scripted: stands on the PYTHONPATH of a stack, where every Python reads it."""

import os
import sys

if "AGENTS_SCRIPT" in os.environ and {"engine", "engine.core"} & set(sys.orig_argv):
    from tests.agents import scripted

    scripted.install()
