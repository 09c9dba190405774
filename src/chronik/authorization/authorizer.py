"""Decisions from ACLs, as Kafka's StandardAuthorizer makes them.

- An ACL applies to a resource if its pattern is the literal name, the wildcard `*`, or a prefix of the name.
- An ACL applies to a client if it names the principal or `User:*`, and the client's host, a range with it, or `*`.
- DENY beats ALLOW. Without an ALLOW the client is denied. `allow_everyone_if_no_acl_found` allows everyone on resources
  to which no ACL of any client applies.
- ALLOW of READ, WRITE, DELETE or ALTER implies DESCRIBE, and of ALTER_CONFIGS implies DESCRIBE_CONFIGS. DENY implies
  nothing. ALL means every operation.
- Super users may do everything; no DENY applies to them.

A decision looks up the literal name, the wildcard, and one prefix for each length that any pattern of the type has. It
does not depend on the number of ACLs. Decisions are cached until an ACL changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from chronik.authorization.acls import (
    EVERY_PRINCIPAL,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from chronik.authorization.hosts import NETWORK_MARK, Network, canonical, parse_address, parse_network

CLIENT_DECISIONS_MAX = 1_000
"""Cached decisions for one principal at one host: a client with many resources does not evict those of others."""
DECISIONS_MAX = 50_000
"""Cached decisions for all clients."""

EVERY_OPERATION = -1
IMPLIED = {
    Operation.READ: Operation.DESCRIBE,
    Operation.WRITE: Operation.DESCRIBE,
    Operation.DELETE: Operation.DESCRIBE,
    Operation.ALTER: Operation.DESCRIBE,
    Operation.ALTER_CONFIGS: Operation.DESCRIBE_CONFIGS,
}
"""What an ALLOW of the operation also allows."""

ANY_NAME = ""
"""The cache's name for "any resource of the type": no resource has the empty name."""

Pattern: TypeAlias = tuple[ResourceType, PatternType, str]
Client: TypeAlias = tuple[str, str]
"""A principal and its host."""
DecisionKey: TypeAlias = tuple[int, str]
"""Operation and resource type in one number, and the name: hashing a member of an enumeration takes as long as the rest
of a cached decision."""


class _Grants:
    """The ACLs of one principal on one pattern, as sets of operations: bit N is operation N."""

    __slots__ = ("_allowed", "_denied", "_hosts", "_is_compiled", "_networks", "acls")

    def __init__(self) -> None:
        self.acls: dict[AclBinding, None] = {}
        self._is_compiled = False
        self._allowed = self._denied = 0
        """For every host; the next two are for single hosts and ranges."""
        self._hosts: dict[str, tuple[int, int]] = {}
        self._networks: list[tuple[Network, int, int]] = []

    def add(self, acl: AclBinding) -> None:
        self.acls[acl] = None
        self._is_compiled = False

    def remove(self, acl: AclBinding) -> None:
        self.acls.pop(acl, None)
        self._is_compiled = False

    def _compile(self) -> None:
        self._is_compiled = True
        self._allowed = self._denied = 0
        self._hosts, self._networks = {}, []
        for acl in self.acls:
            allowed, denied = _operations(acl)
            network = parse_network(acl.host)
            if acl.host == WILDCARD:
                self._allowed |= allowed
                self._denied |= denied
            elif network is not None:
                self._networks.append((network, allowed, denied))
            elif NETWORK_MARK not in acl.host:
                host = canonical(acl.host)
                before = self._hosts.get(host, (0, 0))
                self._hosts[host] = (before[0] | allowed, before[1] | denied)

    def of_host(self, host: str) -> tuple[int, int]:
        """Return the operations that are allowed, and those that are denied, to the principal at the host."""
        if not self._is_compiled:
            self._compile()
        allowed, denied = self._allowed, self._denied
        if self._hosts:
            more = self._hosts.get(canonical(host))
            if more is not None:
                allowed |= more[0]
                denied |= more[1]
        if self._networks:
            address = parse_address(host)
            for network, more_allowed, more_denied in self._networks:
                if address is not None and address in network:
                    allowed |= more_allowed
                    denied |= more_denied
        return allowed, denied


def _operations(acl: AclBinding) -> tuple[int, int]:
    operations = EVERY_OPERATION if acl.operation is Operation.ALL else 1 << acl.operation
    if acl.permission is Permission.DENY:
        return 0, operations
    implied = IMPLIED.get(acl.operation)
    return operations if implied is None else operations | 1 << implied, 0


class Authorizer:
    """All ACLs of a cluster, indexed, with the settings of this node. Owned by the loop.

    Invariant: `_literals`, `_prefixes` and `_patterns` hold exactly the ACLs that were added and not removed; no entry
    is empty. A cached decision equals the decision of the current index.
    """

    def __init__(self, super_users: Iterable[str] = (), *, allow_everyone_if_no_acl_found: bool = False) -> None:
        self._super_users = frozenset(super_users)
        self._default = allow_everyone_if_no_acl_found
        self._literals: dict[tuple[ResourceType, str], dict[str, _Grants]] = {}
        self._prefixes: dict[ResourceType, dict[int, dict[str, dict[str, _Grants]]]] = {}
        """By resource type and length of the prefix."""
        self._patterns: dict[tuple[str, ResourceType], dict[Pattern, _Grants]] = {}
        """By principal and resource type."""
        self._decisions: dict[Client, dict[DecisionKey, bool]] = {}
        self._decision_count = 0

    # -- ACLs ----------------------------------------------------------------------------------------------------------

    def add(self, acls: Iterable[AclBinding]) -> None:
        """Add ACLs. Those that exist already stay as they are."""
        for acl in acls:
            by_principal = self._by_principal(acl)
            grants = by_principal.get(acl.principal)
            if grants is None:
                grants = by_principal[acl.principal] = _Grants()
                patterns = self._patterns.setdefault((acl.principal, acl.resource_type), {})
                patterns[(acl.resource_type, acl.pattern_type, acl.name)] = grants
            grants.add(acl)
        self._forget_decisions()

    def remove(self, acls: Iterable[AclBinding]) -> None:
        """Remove ACLs. Those that do not exist are ignored."""
        for acl in acls:
            by_principal = self._by_principal(acl)
            grants = by_principal.get(acl.principal)
            if grants is not None:
                grants.remove(acl)
                if not grants.acls:
                    del by_principal[acl.principal]
                    patterns = self._patterns[(acl.principal, acl.resource_type)]
                    del patterns[(acl.resource_type, acl.pattern_type, acl.name)]
                    if not patterns:
                        del self._patterns[(acl.principal, acl.resource_type)]
            if not by_principal:
                self._drop_pattern(acl)
        self._forget_decisions()

    def _by_principal(self, acl: AclBinding) -> dict[str, _Grants]:
        """Return the entry of the ACL's pattern, created if it does not exist."""
        if acl.pattern_type is PatternType.PREFIXED:
            lengths = self._prefixes.setdefault(acl.resource_type, {})
            return lengths.setdefault(len(acl.name), {}).setdefault(acl.name, {})
        return self._literals.setdefault((acl.resource_type, acl.name), {})

    def _drop_pattern(self, acl: AclBinding) -> None:
        if acl.pattern_type is not PatternType.PREFIXED:
            del self._literals[(acl.resource_type, acl.name)]
            return
        lengths = self._prefixes[acl.resource_type]
        names = lengths[len(acl.name)]
        del names[acl.name]
        if not names:
            del lengths[len(acl.name)]

    # -- decisions -----------------------------------------------------------------------------------------------------

    def known(self, principal: str, host: str) -> Mapping[DecisionKey, bool]:
        """Return the cached decisions about the client. They are true at any time: an outdated one is removed."""
        return self._decisions.setdefault((principal, host), {})

    def allows(self, principal: str, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        client = (principal, host)
        decisions = self._decisions.get(client)
        key = (operation << 8 | resource_type, name)
        if decisions is not None and key in decisions:
            return decisions[key]
        return self._remember(client, key, self._decide(principal, host, operation, resource_type, name))

    def allows_any(self, principal: str, host: str, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether the principal may carry out the operation on at least one resource of the type.

        As in Kafka: an ALLOW counts unless a DENY covers everything that it allows. A DENY of everything does. A DENY
        of a prefix covers the patterns that begin with it, and one of a literal name that name.
        """
        key = (operation << 8 | resource_type, ANY_NAME)
        decisions = self._decisions.get((principal, host))
        if decisions is not None and key in decisions:
            return decisions[key]
        return self._remember((principal, host), key, self._decide_any(principal, host, operation, resource_type))

    def _decide(self, principal: str, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        if principal in self._super_users:
            return True
        operation_bit = 1 << operation
        is_allowed = has_acls = False
        for by_principal in self._matching(resource_type, name):
            has_acls = True
            for named in (principal, EVERY_PRINCIPAL):
                grants = by_principal.get(named)
                if grants is not None:
                    allowed, denied = grants.of_host(host)
                    if denied & operation_bit:
                        return False
                    is_allowed = is_allowed or allowed & operation_bit != 0
        return is_allowed or (self._default and not has_acls)

    def _matching(self, resource_type: ResourceType, name: str) -> Iterator[dict[str, _Grants]]:
        """Return the ACLs of each pattern that matches the name, by principal."""
        for literal in (name,) if name == WILDCARD else (name, WILDCARD):
            by_principal = self._literals.get((resource_type, literal))
            if by_principal is not None:
                yield by_principal
        for length, prefixes in self._prefixes.get(resource_type, {}).items():
            if length <= len(name):
                by_principal = prefixes.get(name[:length])
                if by_principal is not None:
                    yield by_principal

    def _decide_any(self, principal: str, host: str, operation: Operation, resource_type: ResourceType) -> bool:
        if principal in self._super_users:
            return True
        if self._default and self._allows_unnamed(resource_type):
            return True
        operation_bit = 1 << operation
        allowing: list[tuple[PatternType, str]] = []
        denying: set[tuple[PatternType, str]] = set()
        for named in (principal, EVERY_PRINCIPAL):
            for (_, pattern_type, name), grants in self._patterns.get((named, resource_type), {}).items():
                allowed, denied = grants.of_host(host)
                if denied & operation_bit:
                    denying.add((pattern_type, name))
                if allowed & operation_bit:
                    allowing.append((pattern_type, name))
        if (PatternType.LITERAL, WILDCARD) in denying:
            return False
        return any(not _is_dominated(pattern, denying) for pattern in allowing)

    def _allows_unnamed(self, resource_type: ResourceType) -> bool:
        """Whether some resource of the type has no ACL: always, unless an ACL applies to every name."""
        return (resource_type, WILDCARD) not in self._literals

    # -- cache ---------------------------------------------------------------------------------------------------------

    def _remember(self, client: Client, key: DecisionKey, decision: bool) -> bool:
        if self._decision_count >= DECISIONS_MAX:
            self._forget_decisions()
        decisions = self._decisions.setdefault(client, {})
        if len(decisions) >= CLIENT_DECISIONS_MAX:
            self._decision_count -= len(decisions)
            decisions.clear()
        decisions[key] = decision
        self._decision_count += 1
        return decision

    def _forget_decisions(self) -> None:
        for decisions in self._decisions.values():
            decisions.clear()  # `known` returned some of them
        self._decisions = {}
        self._decision_count = 0


def _is_dominated(pattern: tuple[PatternType, str], denying: set[tuple[PatternType, str]]) -> bool:
    """Whether a DENY covers everything that the pattern allows."""
    pattern_type, name = pattern
    if pattern == (PatternType.LITERAL, WILDCARD):
        return False
    if pattern_type is PatternType.LITERAL and pattern in denying:
        return True
    return any((PatternType.PREFIXED, name[:length]) in denying for length in range(1, len(name) + 1))
