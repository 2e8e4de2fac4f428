"""Processes that compile grammars and prepare large prompts, with budgets and a fair queue."""
