"""The gRPC face, and where each piece of work is done."""
