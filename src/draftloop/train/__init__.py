"""Room `train`; see its modules."""
