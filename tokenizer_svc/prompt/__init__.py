"""From a request to token ids and what its grammar depends on."""
