"""vLLM as the core of an engine; see DESIGN.md."""
