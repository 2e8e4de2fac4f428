"""The core's side of the border, under vLLM's interpreter: imports nothing of the suite."""
