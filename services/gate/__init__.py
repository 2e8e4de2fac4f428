"""The quality gate: whether one server's answers are worse than another's, with a stated error."""
