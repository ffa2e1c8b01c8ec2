"""Room `supervise`; see its modules."""
