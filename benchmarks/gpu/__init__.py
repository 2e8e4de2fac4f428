"""What the engine does on a GPU, beside what the machine could do and what others do on it, in the same run.

`python -m benchmarks.gpu.lease` runs the phases; each is a module with `run(gpu, report)`.
"""
