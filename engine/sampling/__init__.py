"""From logits to tokens: batched, and each row independent of the others. This package root stays free of
torch.
"""
