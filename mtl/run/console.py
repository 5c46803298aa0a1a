"""Write log lines to the console without breaking a progress bar."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class ConsoleHandler(logging.Handler):
    """Print records to the current ``sys.stdout``, which a live progress bar replaces to print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO = sys.stdout
        stream.write(self.format(record) + "\n")
        stream.flush()
