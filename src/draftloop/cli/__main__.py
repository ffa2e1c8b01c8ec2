"""`python -m draftloop.cli`."""

from draftloop.cli import main

main()
