"""What stands beside our gateway in its benchmark: a back end of known speed, LiteLLM before it."""
