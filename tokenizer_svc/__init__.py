"""The tokenizer and grammar service. See DESIGN.md."""
