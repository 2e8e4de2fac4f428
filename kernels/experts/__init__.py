"""Sparse feed-forward layers: the choice of experts, and their products for the tokens that chose them."""
