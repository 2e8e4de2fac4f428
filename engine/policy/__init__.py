"""Decides about those who ask, wait and run. Takes and gives values; knows no sequence and no block."""
