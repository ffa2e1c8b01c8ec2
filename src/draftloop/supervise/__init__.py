"""Trunks, anchors, proposals, teacher rows: what a drafter is taught, and on which text."""
