"""Messages as the contract's types, and those as messages: the one place where either becomes the other."""
