"""Requests and tokens per minute, concurrent streams and monthly budgets, exact under concurrency."""
