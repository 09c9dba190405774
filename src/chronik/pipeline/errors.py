"""A job's error for its user: one line. Spark wraps it in a long stack trace, where `failure_line` finds it."""

from __future__ import annotations

import re

_MARK = "chronik.pipeline.errors.PipelineError: "
_LINE = re.compile(re.escape(_MARK) + r"(.+)")


class PipelineError(Exception):
    """One line that says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def failure_line(error: BaseException) -> str | None:
    """Return our own line from Spark's wrapped error, or None if the failure is not ours."""
    if isinstance(error, PipelineError):
        return str(error)
    found = _LINE.search(str(error))
    return found.group(1).strip() if found else None
