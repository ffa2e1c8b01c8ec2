"""Drafter checkpoints in the forms that engines read and write."""
