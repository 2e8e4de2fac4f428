"""What layers read of a second embedding: torch computes it with the kernels that are there
(engine/model/per_layer).
"""
