"""Room `learn`; see its modules."""
