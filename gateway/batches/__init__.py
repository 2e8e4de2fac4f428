"""Files, and batches of requests that run in what capacity is left: attempts without a connection."""
