"""Drafts: tokens proposed cheaply, verified as rows of the next step. They never change the output."""
