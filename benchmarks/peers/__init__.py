"""Other servers on the same machine, with the same checkpoint and the same client."""
