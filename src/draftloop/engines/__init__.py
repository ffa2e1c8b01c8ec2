"""vLLM and SGLang through their public interfaces: serve, bench, parity. Nothing is patched."""
