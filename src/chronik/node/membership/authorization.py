"""Authorizes the clients of this node by the ACLs in the metadata, and audits what it denies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chronik.authorization.acls import Operation, ResourceType
from chronik.authorization.authorizer import Authorizer
from chronik.metadata.events import AclsCreated, AclsDeleted, Event
from chronik.metadata.image import ClusterImage
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.runtime import Runtime

AUDIT_INTERVAL_S = 60.0
AUDITED_MAX = 500
"""How many denials are logged in an interval. Further ones are only counted."""
LOGGED_CHARS_MAX = 256
"""Clients choose the names that they send."""


class AuthorizationService:
    """The `Decisions` of a node with `authorization.enabled`. Owned by the loop.

    Invariant: the authorizer has exactly the ACLs of this node's image.
    """

    def __init__(self, runtime: Runtime) -> None:
        config = runtime.config.authorization
        self._authorizer = Authorizer(
            config.super_users, allow_everyone_if_no_acl_found=config.allow_everyone_if_no_acl_found
        )
        self._audit = DenialAudit(runtime)
        self.known = self._authorizer.known
        self.allows = self._authorizer.allows
        self.allows_any = self._authorizer.allows_any
        self.denied = self._audit.denied

    def start(self, metadata: MetadataLog) -> None:
        """Follow the metadata. Called before the node serves clients."""
        self._authorizer.add(metadata.image.acls)
        metadata.subscribe(self._metadata_changed)

    def close(self) -> None:
        self._audit.close()

    def _metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, AclsCreated):
                self._authorizer.add(event.acls)
            elif isinstance(event, AclsDeleted):
                self._authorizer.remove(event.acls)


class DenialAudit:
    """Logs denials: each principal and resource once in an interval, then how many others there were.

    Owned by the loop. Invariant: `_logged` has at most AUDITED_MAX entries, and is empty without a running timer.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._loop = runtime.loop
        self._metrics = runtime.metrics
        self._log = runtime.log.bind(component="authorizer")
        self._logged: set[tuple[str, ResourceType, str]] = set()
        self._suppressed = 0
        self._timer: asyncio.TimerHandle | None = None

    def denied(
        self, principal: str, host: str, api: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> None:
        self._metrics.denied(operation.name)
        key = (principal, resource_type, name)
        if key in self._logged or len(self._logged) >= AUDITED_MAX:
            self._suppressed += 1
            return
        self._logged.add(key)
        if self._timer is None:
            self._timer = self._loop.call_later(AUDIT_INTERVAL_S, self._end_interval)
        self._log.info(
            "denied",
            principal=_shown(principal),
            host=host,
            api=api,
            operation=operation.name,
            resource=f"{resource_type.name}:{_shown(name) or 'any'}",
        )

    def _end_interval(self) -> None:
        self._timer = None
        self._logged = set()
        if self._suppressed:
            self._log.info("denials_suppressed", count=self._suppressed)
            self._suppressed = 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._end_interval()


def _shown(name: str) -> str:
    return name if len(name) <= LOGGED_CHARS_MAX else name[:LOGGED_CHARS_MAX] + "..."
