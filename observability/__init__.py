"""Names, tracing, metrics and logging for every service. See DESIGN.md."""
