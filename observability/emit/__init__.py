"""What every service emits: the names of spans, attributes and metrics, and who makes and sends them."""
