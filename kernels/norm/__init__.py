"""Root-mean-square and layer norms. A back end is chosen once, by name."""
