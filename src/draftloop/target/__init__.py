"""The verifier: an unmodified Hugging Face causal LM as hidden rows, tapped features and a readout. See README.md."""
