"""What is logged inside a test, without pytest's plugin for it, which all tests would pay for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def messages_logged() -> Iterator[list[str]]:
    """Give the messages that come to the root logger, or to one that hands nothing on to it."""
    handler = _Messages()
    root = logging.getLogger()
    apart = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    loggers = [root, *(each for each in apart if not each.propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
