"""DeleteGroups (key 42), versions 0-2.

Behaviour
- A group without members is removed with its offsets. The response is sent when the tombstones are written.
- NON_EMPTY_GROUP for a group with members, GROUP_ID_NOT_FOUND for one that does not exist.
Versions: 2 flexible.
"""

from __future__ import annotations

from functools import partial

from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, request: Request) -> Values:
    names = dict.fromkeys(request.message.groups_names)
    return {
        "results": [{"group_id": name, "error_code": await groups.delete_group(name)} for name in names],
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"results": [{"group_id": name, "error_code": code} for name in request.message.groups_names]}


API = Api(ApiKey.DELETE_GROUPS, (0, 2), on_error=on_error)


def handler(groups: GroupService) -> Handler:
    return Handler(API, partial(handle, groups))
