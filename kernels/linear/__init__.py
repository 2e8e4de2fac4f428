"""Matrix products whose rows do not depend on each other. A back end is chosen once, by name."""
