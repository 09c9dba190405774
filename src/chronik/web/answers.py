"""JSON responses, error responses that say what to do, and query parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from chronik.node.serving.access import Access
from chronik.node.serving.signed import Claims
from chronik.web.schemas import Error

CHALLENGE = 'Bearer realm="chronik"'
"""Not Basic: a browser would open its own dialog, and then send the password with every request."""
JSON = "application/json"
INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1


How: TypeAlias = Literal["open", "session", "token", "password", "node"]


class Visitor(NamedTuple):
    """The sender of a request. `claims` are those of its cookie or token."""

    access: Access
    how: How
    claims: Claims | None = None


class Refusal(Exception):
    """An error response. `line` says in one line what is wrong and what to do instead."""

    def __init__(self, status: int, line: str, *, retry_after_s: float = 1.0) -> None:
        # Names in the text may contain line breaks.
        self.line = " ".join(line.split())
        super().__init__(self.line)
        self.status = status
        self.retry_after_s = retry_after_s


def json_answer(value: object, status: int = 200) -> Response:
    """Return a response. Bytes are JSON already."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    # A node's state is outdated within a second.
    return Response(body, status_code=status, media_type=JSON, headers={"cache-control": "no-store"})


async def refused(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for `Refusal`."""
    assert isinstance(error, Refusal)
    answer = json_answer(Error(error.line), error.status)
    if error.status in (429, 503):
        answer.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 401:
        answer.headers["www-authenticate"] = CHALLENGE
    return answer


async def not_here(request: Request, error: Exception) -> Response:
    """Starlette's handler for unknown paths, and for methods that a path does not have."""
    if getattr(error, "status_code", 404) == 405:
        methods = _methods(request)
        is_read_only = methods == ["GET", "HEAD"]
        line = "this path is read-only: use GET" if is_read_only else f"use {' or '.join(methods)}"
        answer = json_answer(Error(line), 405)
        answer.headers["allow"] = ", ".join(methods)
        return answer
    line = f"{request.url.path[:200]} does not exist: see / for the page, or /api/openapi.json for the API"
    return json_answer(Error(line), 404)


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes with the path of a request. Starlette names those of the first one only."""
    found = (
        route.methods or ()
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    )
    return sorted({method for methods in found for method in methods})


@dataclass(frozen=True)
class Number:
    """A query parameter that is an integer between `low` and `high`."""

    name: str
    low: int = 0
    high: int = INT64_MAX
    default: int | None = None
    is_required: bool = False
    description: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        default = {} if self.default is None else {"default": self.default}
        return {"type": "integer", "minimum": self.low, "maximum": self.high, **default}

    @property
    def range(self) -> str:
        return f"{self.low} or more" if self.high == INT64_MAX else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Flag:
    """A query parameter that is 0 or 1."""

    name: str
    description: str = ""
    is_required = False
    schema = {"type": "integer", "enum": [0, 1]}  # noqa: RUF012


@dataclass(frozen=True)
class Text:
    name: str
    characters_max: int | None = None
    description: str = ""
    is_required = False

    @property
    def schema(self) -> dict[str, Any]:
        limit = {} if self.characters_max is None else {"maxLength": self.characters_max}
        return {"type": "string", **limit}


Parameter: TypeAlias = Number | Flag | Text


class Parameters:
    """A request's query parameters, the `name` in its path, and its sender.

    Unless `declared` is None, every query parameter of the request must be declared.
    """

    def __init__(self, request: Request, declared: tuple[Parameter, ...] | None, visitor: Visitor) -> None:
        self.request = request
        self.visitor = visitor
        self.access = visitor.access
        self.name: str = request.path_params.get("name", "")
        self._values: Mapping[str, str] = request.query_params
        if declared is None:
            return
        names = [parameter.name for parameter in declared]
        for name in self._values:
            if name not in names:
                usable = f"use {', '.join(names)}" if names else "this path takes none"
                raise Refusal(400, f"unknown parameter {name[:100]}: {usable}")

    def given(self) -> dict[str, str]:
        """Return all parameters, to forward the request to another node."""
        return dict(self._values)

    def reject_both(self, one: Parameter, other: Parameter) -> None:
        if one.name in self._values and other.name in self._values:
            raise Refusal(400, f"{one.name} and {other.name} were both given: pass one of them")

    def text(self, text: Text) -> str | None:
        """Return None if the parameter is missing or empty."""
        value = self._values.get(text.name) or None
        if value is not None and text.characters_max is not None and len(value) > text.characters_max:
            raise Refusal(400, f"{text.name} has {len(value)} characters: pass at most {text.characters_max}")
        return value

    def flag(self, flag: Flag) -> bool:
        value = self._values.get(flag.name, "0")
        if value not in ("0", "1"):
            raise Refusal(400, f"{flag.name}={value[:100]} is invalid: pass 0 or 1")
        return value == "1"

    def optional(self, number: Number) -> int | None:
        return self.number(number) if number.name in self._values else None

    def number(self, number: Number) -> int:
        """Return the given value or the default. Without a default, the parameter is required."""
        name = number.name
        text = self._values.get(name)
        if text is None:
            if number.default is None:
                raise Refusal(400, f"{name} is missing: pass {name}=N")
            return number.default
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
            raise Refusal(400, f"{name}={text[:100]} is not a whole number: pass {number.range}")
        value = int(text)
        if not number.low <= value <= number.high:
            raise Refusal(400, f"{name}={value} is out of range: pass {number.range}")
        return value
