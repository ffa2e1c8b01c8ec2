"""Room `target`; see its modules."""
