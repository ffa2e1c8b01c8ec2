"""draftloop: train the draft model behind speculative decoding on its own mistakes, and prove that decoding is lossless."""
