"""What executes a step. Free of torch at its root: the core imports a runner by name, when asked."""
