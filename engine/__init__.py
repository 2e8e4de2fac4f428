"""The engine: paged KV cache, continuous batching, sampling and models. See DESIGN.md."""
