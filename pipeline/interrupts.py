"""What Ctrl-C, SIGTERM and a terminal that closes do to a study, phase by phase."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Self

TWICE_S = 3.0  # a second Ctrl-C so soon is impatience, and must not tear what the first one has begun

_SAID = b"interrupted: taking down what runs, please wait\n"


class Interrupts:
    """A `with` block around a study.

    At first signals are only noted: Ray is not to be torn out of its start. From `listen` on they raise
    KeyboardInterrupt. From `hold` on engines are taken down in peace, within that work's own deadlines.
    """

    def __init__(self) -> None:
        self._asked = self._listening = False
        self._raised_at = -TWICE_S
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` asked for that
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.getsignal(number) for number in numbers}

    def __enter__(self) -> Self:
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """From here on an interrupt ends what runs; one that came before does so now."""
        self._install()  # Ray has set its own handler for SIGTERM meanwhile
        self._listening = True
        if self._asked:
            self._interrupt()

    def hold(self) -> None:
        """From here on nothing is interrupted."""
        self._listening = False

    def _install(self) -> None:
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, *_: object) -> None:
        if not self._asked:
            with suppress(OSError):  # not `print`: it may be what was interrupted, and the terminal what is gone
                os.write(2, _SAID)
        self._asked = True
        if self._listening and time.monotonic() - self._raised_at > TWICE_S:
            self._interrupt()

    def _interrupt(self) -> None:
        self._raised_at = time.monotonic()
        raise KeyboardInterrupt
