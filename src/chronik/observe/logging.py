"""Logs as JSON lines: stable event names, fields, one level per component.

Loggers are passed down, never looked up: several nodes share a process, so nothing here touches structlog's global
configuration. `log.bind(component="groups")` returns the logger of the groups component, at its level.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import TextIOBase
from threading import Lock
from typing import Any

from structlog import BoundLoggerBase

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
LEVELS: Mapping[str, int] = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR}
PRINTED_CHARACTERS_MAX = 8192
"""A line of `PrintedLog` is cut there."""


class LogLevelError(ValueError):
    """An invalid level or component; the message says what is valid."""


@dataclass(frozen=True, slots=True)
class LogLevels:
    """The lowest level that is written, by component; `default` applies to all other components."""

    default: int = INFO
    components: Mapping[str, int] = field(default_factory=dict)

    def level_of(self, component: str | None) -> int:
        return self.components.get(component, self.default) if component else self.default

    def changed(self, levels: Mapping[str, int | None], default: int | None = None) -> LogLevels:
        """Return these levels with some changed; a component with None has the default again."""
        components = {name: level for name, level in {**self.components, **levels}.items() if level is not None}
        return LogLevels(self.default if default is None else default, components)

    @classmethod
    def from_names(cls, names: Mapping[str, str]) -> LogLevels:
        """Parse `{"groups": "debug", "default": "info"}` from a node's config file."""
        components = {component: level_named(level) for component, level in names.items()}
        return cls(components.pop("default", INFO), components)


def level_named(name: str) -> int:
    level = LEVELS.get({"warn": "warning"}.get(name.lower(), name.lower()))
    if level is None:
        raise LogLevelError(f"log level {name!r} is unknown: use one of {', '.join(LEVELS)}")
    return level


def parse_levels(texts: Iterable[str]) -> dict[str, str]:
    """Parse and check `["info", "groups=debug"]`; returns `{"default": "info", "groups": "debug"}`."""
    names: dict[str, str] = {}
    for text in texts:
        component, equals, level = text.partition("=")
        if not equals:
            component, level = "default", text
        if not component.strip():
            raise LogLevelError(f"log level {text!r} has no component: write COMPONENT=LEVEL or LEVEL")
        level_named(level.strip())
        names[component.strip()] = level.strip()
    return names


@dataclass(slots=True)
class LogSink:
    """Where lines are written, the clock for timestamps, and the levels to write, which an administrator may change."""

    write: Callable[[str], object]
    wall_ms: Callable[[], int]
    levels: LogLevels


class Logger(BoundLoggerBase):
    """A bound logger whose level depends on its `component` field. Immutable; `bind` returns a new one."""

    @property
    def level(self) -> int:
        sink: LogSink = self._logger
        return sink.levels.level_of(self._context.get("component"))

    @property
    def levels(self) -> LogLevels:
        """The levels of all loggers of the node. A change applies to each at once."""
        sink: LogSink = self._logger
        return sink.levels

    @levels.setter
    def levels(self, levels: LogLevels) -> None:
        self._logger.levels = levels

    def debug(self, event: str, **fields: Any) -> None:
        if self.level <= DEBUG:
            self._emit("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        if self.level <= INFO:
            self._emit("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        if self.level <= WARNING:
            self._emit("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        if self.level <= ERROR:
            self._emit("error", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Log an error with the current exception; the traceback is one field of the line."""
        self.error(event, **(fields | _described(sys.exc_info()[1]) | fields))

    def _emit(self, level: str, event: str, fields: dict[str, Any]) -> None:
        sink: LogSink = self._logger
        line = {
            "time": datetime.fromtimestamp(sink.wall_ms() / 1000, UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "event": event,
            **self._context,
            **fields,
        }
        sink.write(json.dumps(line, default=str) + "\n")


def _described(error: BaseException | None) -> dict[str, Any]:
    return {} if error is None else {"error": repr(error), "traceback": "".join(traceback.format_exception(error))}


def make_logger(
    write: Callable[[str], object], wall_ms: Callable[[], int], levels: LogLevels | None = None, **context: Any
) -> Logger:
    """Return a node's root logger: `write` takes one line, `wall_ms` is the clock, `context` is on every line."""
    return Logger(LogSink(write, wall_ms, levels or LogLevels()), (), {"component": "node", **context})


class LibraryLog(logging.Handler):
    """Converts messages from Python's logging to JSON lines: nothing else may appear among the JSON."""

    def __init__(self, log: Logger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            detail = record.getMessage()
        except Exception:  # arguments do not match the format: a library's bug must not fail its caller
            detail = str(record.msg)
        fields: dict[str, Any] = {"library": record.name, "detail": detail}
        if record.exc_info is not None:
            fields |= _described(record.exc_info[1])
        log = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        log("library_message", **fields)


class PrintedLog(TextIOBase):
    """A text stream in the place of `sys.stderr`, which converts each line that a library prints to a JSON line."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._lock = Lock()
        self._partial = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._partial = (self._partial + text).split("\n")
            if len(self._partial) > PRINTED_CHARACTERS_MAX:
                lines.append(self._partial)
                self._partial = ""
        for line in lines:
            if line.strip():
                self._log.warning("library_message", library="stderr", detail=line[:PRINTED_CHARACTERS_MAX])
        return len(text)


def silent_logger() -> Logger:
    """Return a logger that writes nothing, for tests and tools."""
    return make_logger(lambda line: None, lambda: 0, LogLevels(default=100))
