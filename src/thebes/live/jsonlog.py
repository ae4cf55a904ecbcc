"""Structured logs of the server: one JSON object per line, in files that are changed at 10 MiB.

    log = jsonlog.get("controller")
    log.info("job started", extra={"fields": {"job_id": "17", "node": "n0"}})

Values of the environment of jobs are never logged, because they are never passed to this module.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = "thebes"
MAX_BYTES = 10 << 20
KEPT = 5


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _Rotating(logging.handlers.RotatingFileHandler):
    """A log that cannot be written (disk full) must not stop the server, nor fill stderr with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        if isinstance(sys.exc_info()[1], OSError):
            return
        super().handleError(record)


def start(path: Path, *, level: str = "INFO", max_bytes: int = MAX_BYTES, kept: int = KEPT) -> logging.Handler:
    """Send the logs of Thebes and of uvicorn to one file, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=True)
    handler = _Rotating(path, maxBytes=max_bytes, backupCount=kept, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(JsonLines())
    for name in (ROOT, "uvicorn"):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("uvicorn.access").disabled = True  # every request is in the metrics; lines would cost too much
    return handler


def stop(handler: logging.Handler) -> None:
    """Undo all that `start` did, and close the handler's file."""
    for name in (ROOT, "uvicorn"):
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    logging.getLogger("uvicorn.access").disabled = False
    with suppress(OSError):  # what could not be written before cannot be written now
        handler.close()


def get(name: str) -> logging.Logger:
    """The logger of one part of the server."""
    return logging.getLogger(f"{ROOT}.{name}")
