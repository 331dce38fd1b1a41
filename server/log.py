"""Logs: structlog to stderr, JSON off a terminal. Nothing else is decided here."""

import logging
import sys
from typing import Any

import structlog

LEVELS = ("debug", "info", "warning", "error")


def set_up(level: str = "info", form: str = "auto") -> None:
    """Configure structlog for this process.

    Args:
        level: least severe level that is written, one of ``LEVELS``.
        form: ``json``, ``console`` or ``auto`` (console on a terminal, else JSON).
    """
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
