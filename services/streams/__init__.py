"""Long-lived gRPC streams between the services without gRPC's threads; see DESIGN.md."""
