"""Room `decode`; see its modules."""
