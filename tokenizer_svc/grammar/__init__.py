"""From response formats and tools to serialized grammars: rewriting, compiling under budgets, caching."""
