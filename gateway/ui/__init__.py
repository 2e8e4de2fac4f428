"""The page at /ui, and the endpoints that tell it of its key: account, usage, and operators' view."""
