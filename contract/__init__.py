"""What the services agree on, said once; see DESIGN.md."""
