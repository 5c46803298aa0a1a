"""Write log lines to the console so that they do not tear a progress bar."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class ConsoleHandler(logging.Handler):
    """Print records to what ``sys.stdout`` is at that moment: a live progress bar puts itself there to make room."""

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO = sys.stdout
        stream.write(self.format(record) + "\n")
        stream.flush()
