"""A load generator for any OpenAI-compatible server: `millrace bench`."""
