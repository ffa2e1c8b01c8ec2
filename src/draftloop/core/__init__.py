"""Beneath everything: laws, keyed draws, blocks, the tree layout, weight files, errors. Knows no room above it."""
