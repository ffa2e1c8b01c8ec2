"""The command line: a thin layer over the typed API (`draftloop.api`).

Exit status: 0 done, 1 our fault, 2 your input, 3 the environment.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from typing import Any

from draftloop.cli import adapt, bench, export, measure, parity, serve, train  # noqa: F401  (importing a file registers it)
from draftloop.cli.app import app
from draftloop.core.errors import DraftloopError, EnvironmentFault
from draftloop.core.ranks import follows, has_the_word


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every error that we can name becomes one sentence and an exit status."""
    try:
        with ExitStack() as stack, warnings.catch_warnings():
            if follows():  # of the processes that train together the first one speaks
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
            warnings.showwarning = _warn
            app(args=list(arguments) if arguments is not None else None)
    except SystemExit as done:
        if done.code in (130, 143) and not follows():  # Ctrl-C, or SIGTERM while a stage trained
            again = "without --fresh the same command" if "--fresh" in (arguments or sys.argv) else "the same command"
            print(f"draftloop: stopped; {again} goes on where it was.", file=sys.stderr)
        raise
    except Exception as error:
        if logging.getLogger("draftloop").level == logging.DEBUG:
            raise
        sentence, code = _explain(error)
        if has_the_word():
            print(f"draftloop: {' '.join(sentence.split())}", file=sys.stderr)
        sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    """One sentence on what happened, and the exit status."""
    if isinstance(error, DraftloopError):
        return str(error), error.exit_code
    short = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if isinstance(error, MemoryError) or short:
        return "out of memory. Lower batch_size, or use a smaller target.", EnvironmentFault.exit_code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}the disk is full. Free some space and run the same command again.", EnvironmentFault.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        reason = f"{error.filename}: {error.strerror}. Check the path, and that it can be read and written."
        return reason, EnvironmentFault.exit_code
    told = f"{type(error).__name__}: {error}"
    return f"our fault: {told}. `draftloop --log-level debug ...` shows where; please report it.", 1


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    if not follows():
        print(f"draftloop: warning: {' '.join(str(message).split())}", file=sys.stderr)
