"""Training that makes a checkpoint cheaper to serve, each a page of code on torch's own tools. What it
costs in answers is measured by `python -m benchmarks.training_forms`, and of one's own model by `millrace
gate`.
"""
