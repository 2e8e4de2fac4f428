"""What executes a step. This package root stays free of torch: the core imports runners by name, when asked."""
