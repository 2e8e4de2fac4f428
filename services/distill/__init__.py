"""Answers of a served model as training data for a smaller one."""
