"""Room `formats`; see its modules."""
