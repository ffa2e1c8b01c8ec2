"""Speculative decoding: verification rules, the batched loop, the trace that it records. Plain decoding is K = 0."""
