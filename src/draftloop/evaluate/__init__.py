"""Acceptance length, the exact fast walk, measured speed, the losslessness audit, the report."""
