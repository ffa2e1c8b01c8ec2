"""Room `drafter`; see its modules."""
