"""What the rooms of the gateway tell each other: who asks, for what, and the prompt made ready."""
