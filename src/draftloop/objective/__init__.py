"""Losses: one number a row, terms over blocks, global denominators. See README.md."""
