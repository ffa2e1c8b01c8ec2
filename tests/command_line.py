"""The command line, called in this process."""

from __future__ import annotations

import pytest

from draftloop.cli import main


def called(capsys, *arguments) -> tuple[int, str, str]:
    """Status, standard output and standard error of one command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return (int(done.value.code or 0), *capsys.readouterr())
