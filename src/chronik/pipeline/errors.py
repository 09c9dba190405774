"""A job's error for its user: one line. Spark wraps it in a long stack trace, where `failure_line` finds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE = re.compile(r"chronik\.pipeline\.errors\.(PipelineError|Unavailable): (.+)")
_RAISED = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))(?:: (.+))?$", re.MULTILINE)
"""The last line of a Python traceback, which Spark includes in its own error."""
_NOTHING_SAID = ("An exception was thrown from the Python worker", "An error occurred while calling o")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_REFUSAL = re.compile(
    r"40(?:1 Unauthorized|3 Forbidden|4 Not Found)|lacked (?:the necessary privileges|valid authentication)"
    r"|Object at location \S+ not found|AWS Error (?:ACCESS_DENIED|NO_SUCH_\w+|INVALID_ACCESS_KEY_ID|SIGNATURE_\w+)"
)


class PipelineError(Exception):
    """One line that says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(_COLOUR.sub("", message).split()))


class Unavailable(PipelineError):
    """The cause may pass by itself, as brokers that are down do. A later attempt can succeed."""


def is_refusal(error: BaseException) -> bool:
    """Return whether an object store refused access or has no such place. Libraries say so only in their texts."""
    return _REFUSAL.search(str(error)) is not None


def store_failure(error: BaseException) -> type[PipelineError]:
    """Return the kind of error that a failed access to an object store is: a refusal does not pass by itself."""
    return PipelineError if is_refusal(error) else Unavailable


def failure_of(error: BaseException) -> PipelineError | None:
    """Return our own error from Spark's wrapped error, or None if the failure is not ours."""
    if isinstance(error, PipelineError):
        return error
    found = _LINE.search(str(error))
    if found is None:
        return None
    return (Unavailable if found.group(1) == Unavailable.__name__ else PipelineError)(found.group(2))


def failure_line(error: BaseException) -> str | None:
    """Return our own line from Spark's wrapped error, or None if the failure is not ours."""
    failure = failure_of(error)
    return None if failure is None else str(failure)


def reason_of(error: BaseException) -> str:
    """Return one line that gives the cause of any error: ours, that of a Python worker, or the first of Spark's."""
    text = str(error)
    line = failure_line(error)
    if line is not None:
        return line
    raised = [f"{name}: {rest}" if rest else name for name, rest in _RAISED.findall(text.partition("Traceback")[2])]
    if raised:
        return raised[0].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not any(nothing in line for nothing in _NOTHING_SAID)]
    return (telling or lines or [type(error).__name__])[0]


@contextmanager
def task_errors(what: str | Callable[[], str], trace: str = "Spark's log has the trace") -> Iterator[None]:
    """Raise whatever fails inside a task as one line that begins with `what`: Spark and DuckDB keep only the text."""
    try:
        yield
    except (PipelineError, GeneratorExit):
        raise
    except Exception as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        begin = what if isinstance(what, str) else what()
        raise PipelineError(f"{begin} failed: {detail}; {trace}") from error
