"""What one tenant's attacks do to another's answers."""
