"""Real gRPC peers with behaviour that can be checked by hand, and a gateway wired to them."""
