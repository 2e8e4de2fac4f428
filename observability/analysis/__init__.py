"""What reads traces and metrics: the local span store with its receiver, and the answers in the terminal."""
