"""Room `objective`; see its modules."""
