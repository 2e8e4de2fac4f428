"""What a checkpoint says of text, and text to token ids."""
