"""How hard a model shall think, in the words of all APIs.

A template that reads the word tells the model. For any other the gateway makes a budget of it, a share of
what may be thought at most.
"""

from __future__ import annotations

# The variable under which templates look for the word.
EFFORT = "reasoning_effort"
# Ends all thinking.
NO_EFFORT = "none"
# Words in ascending order.
EFFORTS = (NO_EFFORT, "minimal", "low", "medium", "high", "xhigh", "max")
