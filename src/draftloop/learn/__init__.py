"""One update of the drafter, whatever the method."""
