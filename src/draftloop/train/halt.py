"""Ctrl-C and SIGTERM while a stage trains: noted at once, heeded between two steps, so that no state is half a step.

Knows signals; knows no stage. A second Ctrl-C stops where it is.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | None

_DEFAULTS: dict[signal.Signals, _Handler] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_SAID = "draftloop: stopping after this step, which is then saved; a second Ctrl-C stops now and saves nothing.\n"


@dataclass
class Halt:
    """Whether to stop.

    Attributes:
        asked: the signal that asked for it; 0 = none.
    """

    asked: int = 0


class Halted(BaseException):
    """A stage stopped as asked, its state saved.

    Args:
        asked: the signal.
    """

    def __init__(self, asked: int) -> None:
        self.asked = asked
        super().__init__(asked)

    @property
    def ending(self) -> BaseException:
        """How the process ends: as of Ctrl-C, or with the status 128 + n that signal n has in a shell."""
        return KeyboardInterrupt() if self.asked == signal.SIGINT else SystemExit(128 + self.asked)


@contextmanager
def heeding(*, speak: bool) -> Iterator[Halt]:
    """Note these signals instead of obeying them, unless they are ignored or another program that embeds us has them.

    Args:
        speak: say on standard error that the step is finished first.
    """
    halt = Halt()

    def note(number: int, frame: FrameType | None) -> None:
        if halt.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not halt.asked and speak:
            os.write(2, _SAID.encode())  # print may be what was interrupted, and does not nest
        halt.asked = halt.asked or number

    mine = threading.current_thread() is threading.main_thread()  # others cannot
    held = [number for number, usual in _DEFAULTS.items() if mine and signal.getsignal(number) == usual]
    for number in held:
        signal.signal(number, note)
    try:
        yield halt
    finally:
        for number in held:
            signal.signal(number, _DEFAULTS[number])
