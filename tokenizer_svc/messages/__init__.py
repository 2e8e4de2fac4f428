"""Messages of the wire and domain types."""
