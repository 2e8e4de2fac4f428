"""What requests ask of their tokens: options by slot, grammars, and which kernels draw. This package root
stays free of torch.
"""
