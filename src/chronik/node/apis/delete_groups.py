"""DeleteGroups (key 42), versions 0-3.

Behaviour
- A group without members is removed with its offsets. The response is sent when the tombstones are written.
- Of a share group, the share coordinators delete the state of its partitions first. If one does not answer, the group
  remains, and its error is returned.
- NON_EMPTY_GROUP for a group with members, GROUP_ID_NOT_FOUND for one that does not exist.
Versions: 2 flexible, 3 an error message for each group (KIP-1331).
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import refuse_entries
from chronik.node.coordinators.group_service import GroupService
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(groups: GroupService, request: Request) -> Values:
    async def delete(name: str) -> ErrorCode:
        if not request.access.allows(Operation.DELETE, ResourceType.GROUP, name):
            return ErrorCode.group_authorization_failed
        return await groups.delete_group(name)

    results = []
    for name in dict.fromkeys(request.message.groups_names):
        error = await delete(name)
        results.append({"group_id": name, "error_code": error, "error_message": _MESSAGES.get(error)})
    return {"results": results}


_MESSAGES = {
    ErrorCode.non_empty_group: "The group has members.",
    ErrorCode.group_id_not_found: "The group does not exist.",
}


API = Api(
    ApiKey.DELETE_GROUPS,
    (0, 3),
    on_error=refuse_entries("results", lambda request: ({"group_id": name} for name in request.message.groups_names)),
)
