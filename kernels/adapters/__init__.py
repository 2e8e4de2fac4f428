"""What low-rank adapters (LoRA, arXiv 2106.09685) add to products, for rows of several adapters at once."""
