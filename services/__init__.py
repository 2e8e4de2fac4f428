"""The roof: what is started, and how. The supervisor, the command line, the load generator, the images."""
