"""JSON responses, error responses that say what to do, and parsing of query parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

JSON = "application/json"
INT64_MAX = (1 << 63) - 1


class Refusal(Exception):
    """An error response. `line` says in one line what is wrong and what to do instead."""

    def __init__(self, status: int, line: str) -> None:
        # Names in the text may contain line breaks.
        self.line = " ".join(line.split())
        super().__init__(self.line)
        self.status = status


def json_answer(value: Any, status: int = 200) -> Response:
    return encoded_answer(msgspec.json.encode(value), status)


def encoded_answer(body: bytes, status: int = 200) -> Response:
    # A node's state is outdated within a second.
    return Response(body, status_code=status, media_type=JSON, headers={"cache-control": "no-store"})


async def refused(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for `Refusal`."""
    assert isinstance(error, Refusal)
    answer = json_answer({"error": error.line}, error.status)
    if error.status == 503:
        answer.headers["retry-after"] = "1"
    return answer


async def not_here(request: Request, error: Exception) -> Response:
    """Starlette's handler for unknown paths, and for methods that would change something."""
    if getattr(error, "status_code", 404) == 405:
        answer = json_answer({"error": "nothing can be changed here: ask with GET"}, 405)
        answer.headers["allow"] = "GET, HEAD"
        return answer
    line = f"nothing is at {request.url.path[:200]}: see / for the page, or /api/cluster and /api/topics"
    return json_answer({"error": line}, 404)


class Parameters:
    """A request's query parameters. Every name must be known, and every number must be within its bounds."""

    def __init__(self, request: Request, known: tuple[str, ...]) -> None:
        self._values: Mapping[str, str] = request.query_params
        for name in self._values:
            if name not in known:
                asked = f"use {', '.join(known)}" if known else "there are none here"
                raise Refusal(400, f"unknown parameter {name[:100]}: {asked}")

    def given(self) -> dict[str, str]:
        """Return all parameters, to forward the request to another node."""
        return dict(self._values)

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        """Return None if the parameter is missing or empty."""
        return self._values.get(name) or None

    def flag(self, name: str) -> bool:
        value = self._values.get(name, "0")
        if value not in ("0", "1"):
            raise Refusal(400, f"{name}={value[:100]} is unknown: pass 0 or 1")
        return value == "1"

    def number(self, name: str, default: int | None, low: int = 0, high: int = INT64_MAX) -> int:
        """Return an integer. Without a default, the parameter is required."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise Refusal(400, f"{name} is missing: pass {name}=N")
            return default
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
            raise Refusal(400, f"{name}={value[:100]} is no whole number: pass {_range(low, high)}")
        number = int(value)
        if not low <= number <= high:
            raise Refusal(400, f"{name}={number} is out of range: pass {_range(low, high)}")
        return number


def _range(low: int, high: int) -> str:
    return f"{low} or more" if high == INT64_MAX else f"{low} to {high}"
