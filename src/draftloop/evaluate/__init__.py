"""Room `evaluate`; see its modules."""
