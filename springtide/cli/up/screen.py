"""What `springtide up` prints: lines that stay, and on a terminal one live line below them."""

import shutil
import sys
from typing import TextIO

import click


class Screen:
    """Never raises: the terminal may hang up while the stack is being stopped."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._terminal = self._out.isatty()
        self._live = ""

    def say(self, line: str = "") -> None:
        """A line that stays."""
        self._write((self._erase() + line if self._terminal else click.unstyle(line)) + "\n")
        self._redraw()

    def live(self, line: str) -> None:
        """Replaces the live line; nothing when there is no terminal."""
        if not self._terminal or line == self._live:
            return
        self._write(self._erase())
        self._live = line
        self._redraw()

    def _redraw(self) -> None:
        if self._terminal and self._live:
            width = shutil.get_terminal_size().columns
            self._write(click.style(self._live[: max(1, width - 1)], dim=True))

    def _erase(self) -> str:
        return "\r\x1b[K"

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError):
            self._terminal = False
