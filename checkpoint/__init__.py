"""Files that models come in: where a checkpoint is, GGUF, and the vocabularies of every format."""
