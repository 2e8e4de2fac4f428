"""How many rows a product has: always a multiple of ROW_MULTIPLE (reference.py says why)."""

ROW_MULTIPLE = 16
