"""DeleteGroups (key 42), versions 0-2.

Behaviour
- A group without members is removed with its offsets; the answer comes when the tombstones are written.
- NON_EMPTY_GROUP for a group with members, GROUP_ID_NOT_FOUND for one that does not exist.
Versions: 2 flexible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chronik.node.serving.request import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

if TYPE_CHECKING:
    from chronik.node.broker import Broker


async def handle(broker: Broker, request: Request) -> Values:
    names = dict.fromkeys(request.message.groups_names)
    return {
        "results": [{"group_id": name, "error_code": await broker.groups.delete_group(name)} for name in names],
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"results": [{"group_id": name, "error_code": code} for name in request.message.groups_names]}


API = Api(ApiKey.DELETE_GROUPS, (0, 2), handle, on_error=on_error)
