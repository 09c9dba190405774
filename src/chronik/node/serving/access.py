"""What the client at the other end of a connection may do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from chronik.authorization.acls import ANONYMOUS, CLUSTER_NAME, Operation, ResourceType
from chronik.wire.errors import ErrorCode, KafkaError

REFUSALS = {
    ResourceType.TOPIC: ErrorCode.topic_authorization_failed,
    ResourceType.GROUP: ErrorCode.group_authorization_failed,
    ResourceType.CLUSTER: ErrorCode.cluster_authorization_failed,
    ResourceType.TRANSACTIONAL_ID: ErrorCode.transactional_id_authorization_failed,
    ResourceType.DELEGATION_TOKEN: ErrorCode.delegation_token_authorization_failed,
}
"""The error of a request that names a resource on which the client lacks the right."""

OPERATIONS = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
}
"""The operations that a describing API reports for a resource of the type, if the client may carry them out."""


class Decisions(Protocol):
    """The authorizer, as a connection uses it."""

    def known(self, principal: str, host: str) -> Mapping[tuple[int, str], bool]:
        """Return earlier decisions about the client that still hold, by `operation << 8 | type` and name."""

    @property
    def allows(self) -> Callable[[str, str, Operation, ResourceType, str], bool]:
        """Decides from principal, host, operation, and the type and name of a resource."""

    def allows_any(self, principal: str, host: str, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether the client may carry out the operation on at least one resource of the type."""

    def denied(
        self, principal: str, host: str, api: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> None:
        """Audit a denial. An empty name is any resource of the type."""


class Access:
    """The rights of one client: of its principal, from its host. Immutable; authenticating again makes a new one.

    `is_open` is True if this node has no authorizer: then every check passes, and hot paths skip it. `api` names the
    API of the request for the audit log.
    """

    __slots__ = ("_by_api", "_decisions", "_known", "api", "host", "is_open", "principal")

    def __init__(self, principal: str, host: str, decisions: Decisions | None, api: str = "") -> None:
        self.principal = principal
        self.host = host
        self.api = api
        self.is_open = decisions is None
        self._decisions = decisions
        self._known: Mapping[tuple[int, str], bool] = {}
        self._by_api: dict[str, Access] = {}

    def for_api(self, api: str) -> Access:
        """Return the same rights for requests of an API. At most one for each API that the node serves is kept."""
        access = self._by_api.get(api)
        if access is None:
            access = self._by_api[api] = Access(self.principal, self.host, self._decisions, api)
        return access

    def allows(self, operation: Operation, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Whether the client may carry out an operation that it requested on a named resource."""
        if self._known.get((operation << 8 | resource_type, name)) or self.has(operation, resource_type, name):
            return True
        assert self._decisions is not None
        self._decisions.denied(self.principal, self.host, self.api, operation, resource_type, name)
        return False

    def has(self, operation: Operation, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """As `allows`, but not audited: another right may suffice, or the caller only filters what it lists."""
        decisions = self._decisions
        if decisions is None:
            return True
        self._known = decisions.known(self.principal, self.host)
        return decisions.allows(self.principal, self.host, operation, resource_type, name)

    def sees(self, resource_type: ResourceType, name: str) -> bool:
        """Whether a listing shows the resource to the client: it needs DESCRIBE. Not audited."""
        return self.has(Operation.DESCRIBE, resource_type, name)

    def allows_any(self, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether the client may carry out the operation on at least one resource of the type."""
        decisions = self._decisions
        if decisions is None or decisions.allows_any(self.principal, self.host, operation, resource_type):
            return True
        decisions.denied(self.principal, self.host, self.api, operation, resource_type, "")
        return False

    def require(self, operation: Operation, resource_type: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise the type's authorization error unless the client has the right."""
        if not self.allows(operation, resource_type, name):
            raise KafkaError(REFUSALS[resource_type])

    def authorized_operations(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> int:
        """Return the client's operations on the resource as Kafka's bit field. Not audited."""
        operations = OPERATIONS[resource_type]
        return sum(1 << operation for operation in operations if self.has(operation, resource_type, name))


class NoRights:
    """Decisions that deny everything, and audit nothing: nobody decided about this client."""

    def known(self, *_: object) -> Mapping[tuple[int, str], bool]:
        return {}

    def allows(self, *_: object) -> bool:
        return False

    def allows_any(self, *_: object) -> bool:
        return False

    def denied(self, *_: object) -> None:
        pass


OPEN_ACCESS = Access(ANONYMOUS, "", None)
"""The access of a connection on which nothing is checked."""
