"""A judge of steps for the bundled model's arithmetic: its lessons, its training, its measures."""
