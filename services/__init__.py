"""What is started, and how: the runtime that every service shares, the supervisor and the command line."""
