"""The one error that draftloop raises on purpose: what is wrong, where, and what to do about it.

Knows nothing of models or files. The command line turns it into one sentence and an exit status.
"""

from __future__ import annotations


class DraftloopError(Exception):
    """A problem that we can name.

    Args:
        what: what is wrong, as a clause without a final stop ("line 3 is not JSON").
        where: the file, key or object in which it is wrong; may be empty.
        fix: what the user can do about it, as a sentence; may be empty.

    `exit_code` is 1 (our fault); the subclasses say 2 (your input) and 3 (the environment).
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        head = f"{where}: {what}" if where else what
        super().__init__(f"{head}. {fix}" if fix else f"{head}.")


class InputError(DraftloopError):
    """The user's input (a recipe, a prompt file, a checkpoint, a flag) cannot be used. Exit status 2."""

    exit_code = 2


class EnvironmentFault(DraftloopError):
    """The machine (a missing package, no network, no memory, a full disk) stands in the way. Exit status 3."""

    exit_code = 3
