"""The models that propose, with a packed path and a cached path that must agree. See README.md."""
