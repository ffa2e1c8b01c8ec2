"""Acceptance length, the exact fast walk, measured speed, the losslessness audit, the report."""

PLAIN = "none"  # the name of plain decoding, where drafters are named; here, for the command line asks it first
