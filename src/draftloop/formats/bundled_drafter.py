"""The drafter that comes with the project, for the embedded target.

Knows where it lies in the package. Its model card, `bundled/README.md`, says how it was made.
"""

from __future__ import annotations

import os
from pathlib import Path

NAME = "bundled"  # says so wherever a drafter folder is asked for


def named_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that a user named: `bundled` is the one in the package, unless a folder here has that name."""
    folder = Path(path).expanduser()
    if str(path) == NAME and not folder.exists():
        return Path(__file__).parent / NAME
    return folder
