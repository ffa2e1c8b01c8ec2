"""Room `core`; see its modules."""
