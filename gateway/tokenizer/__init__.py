"""The tokenizer service as the gateway sees it."""
