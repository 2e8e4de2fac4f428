"""What large, refused and unread requests may take of the process that everybody shares."""
