"""What an API module needs: the requests that it receives, and the description of its API and handler.

A *cold* handler is a coroutine: it receives the decoded request and returns the response's fields as a dict, or
`LargeValues`. A *hot*
handler (Produce, Fetch) is a plain function that parses the frame itself and answers through the request's `Reply`, at
once or later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from chronik.node.serving.connection import Reply as Reply
from chronik.node.serving.connection import Request as Request
from chronik.wire.errors import ErrorCode

Values: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LargeValues:
    """The fields of a response that would block the loop: `make` returns them.

    It runs in a thread, like the encoding, so it must touch immutable values only.
    """

    make: Callable[[], Values]


ColdHandler: TypeAlias = Callable[[Request], Awaitable[Values | LargeValues]]
HotHandler: TypeAlias = Callable[[Request, Reply], None]
ErrorValues: TypeAlias = Callable[[Request, ErrorCode], Values]


@dataclass(frozen=True, slots=True)
class Api:
    """One API as this node serves it.

    `versions` is the range that ApiVersions advertises. `readable_from` is the lowest version that is really parsed, if
    the advertised minimum is lower only to satisfy a client's feature check. With `on_controller` the server forwards
    the request, unless this node is the controller, and waits until this node's image includes the effect.
    """

    key: IntEnum
    """`serving.rights` lists the rights that requests of this API need."""
    versions: tuple[int, int]
    on_error: ErrorValues | None = None
    readable_from: int | None = None
    on_controller: bool = False
    is_local: Callable[[Any], bool] | None = None
    """Whether this node answers a message of an API that is otherwise answered by the controller."""
    unsupported_version_body: Callable[[], bytes] | None = None
    """The response to an unsupported version; without one the connection is closed."""

    @property
    def parsed_versions(self) -> tuple[int, int]:
        lowest = self.versions[0] if self.readable_from is None else self.readable_from
        return lowest, self.versions[1]


@dataclass(frozen=True, slots=True)
class Handler:
    """An API and its handler on this node: either `cold` or `hot`."""

    api: Api
    cold: ColdHandler | None = None
    hot: HotHandler | None = None
