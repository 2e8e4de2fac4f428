"""The OpenAI face: JSON over HTTP, server-sent events for streams."""
