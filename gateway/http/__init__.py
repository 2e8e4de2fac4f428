"""The wire of the HTTP faces: JSON over HTTP, server-sent events for streams."""
