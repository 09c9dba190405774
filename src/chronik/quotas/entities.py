"""Quota entities, the values that may be set on them, and the rules that decide which of them apply to a client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from ipaddress import ip_address
from typing import NamedTuple, TypeAlias

import msgspec

from chronik.wire.errors import ErrorCode, KafkaError


class EntityType(StrEnum):
    """The parts of an entity, under Kafka's names."""

    USER = "user"
    CLIENT_ID = "client-id"
    IP = "ip"


class QuotaKey(StrEnum):
    """The values of an entity, under Kafka's names."""

    PRODUCER_BYTE_RATE = "producer_byte_rate"
    CONSUMER_BYTE_RATE = "consumer_byte_rate"
    REQUEST_PERCENTAGE = "request_percentage"
    CONTROLLER_MUTATION_RATE = "controller_mutation_rate"
    CONNECTION_CREATION_RATE = "connection_creation_rate"


WHOLE_NUMBERS = frozenset({QuotaKey.PRODUCER_BYTE_RATE, QuotaKey.CONSUMER_BYTE_RATE, QuotaKey.CONNECTION_CREATION_RATE})
IP_KEYS = frozenset({QuotaKey.CONNECTION_CREATION_RATE})
CLIENT_KEYS = frozenset(QuotaKey) - IP_KEYS
ENTITY_NAME_CHARS_MAX = 1024
_TYPES = frozenset(EntityType)

Part: TypeAlias = tuple[str, str | None]
Values: TypeAlias = Mapping[str, float]


class QuotaEntity(msgspec.Struct, frozen=True, array_like=True):
    """A user, a client id, both, or an address. The name None means the default of that type.

    Invariant: the parts are in the order of `EntityType`, so that equal entities compare equal. `make_entity` ensures
    it, and checks the names.
    """

    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return ", ".join(f"{kind}={'<default>' if name is None else name}" for kind, name in self.parts)


def make_entity(parts: Iterable[Part]) -> QuotaEntity:
    """Return the entity of these parts, or raise INVALID_REQUEST if no quota can be set on it."""
    named: dict[str, str | None] = {}
    for kind, name in parts:
        if kind not in _TYPES:
            raise _refused(f"Unhandled client quota entity type: {kind}")
        if kind in named:
            raise _refused(f"Duplicate entity type {kind}")
        if name is not None and not name:
            raise _refused(f"Empty {kind} not supported")
        if name is not None and len(name) > ENTITY_NAME_CHARS_MAX:
            raise _refused(f"The {kind} has {len(name)} characters; at most {ENTITY_NAME_CHARS_MAX} are allowed")
        named[kind] = _address(name) if kind == EntityType.IP and name is not None else name
    if not named:
        raise _refused("Invalid empty client quota entity")
    if EntityType.IP in named and len(named) > 1:
        raise _refused("An ip quota cannot name a user or a client id")
    return QuotaEntity(tuple((str(kind), named[kind]) for kind in EntityType if kind in named))


def normalized_address(text: str) -> str:
    """Return the address in one form, whichever form a socket or an operator uses; other text is unchanged."""
    try:
        address = ip_address(text)
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(address if mapped is None else mapped)


def _address(name: str) -> str:
    try:
        ip_address(name)
    except ValueError:
        raise _refused(f"{name} is not a valid IP address") from None
    return normalized_address(name)


def check_changes(entity: QuotaEntity, changes: Mapping[str, float | None]) -> None:
    """Raise INVALID_REQUEST unless these values can be set (None: removed) on the entity."""
    allowed = IP_KEYS if entity.parts[0][0] == EntityType.IP else CLIENT_KEYS
    for key, value in changes.items():
        if value is None:
            continue
        if key not in allowed:
            raise _refused(f"Invalid configuration key {key}")
        if not math.isfinite(value):
            raise _refused(f"{key} must be a finite number")
        if key in WHOLE_NUMBERS and value != int(value):
            raise _refused(f"{key} must be a whole number, not {value}")
        if value < 0 or (value == 0 and key not in IP_KEYS):
            raise _refused(f"{key} must be greater than 0, not {value}")


def _refused(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.invalid_request, reason)


class Bucket(NamedTuple):
    """The clients that share one limit: all of a user, all of a client id, or those of one user and client id."""

    user: str | None
    client_id: str | None


class Limit(NamedTuple):
    value: float
    bucket: Bucket


class QuotaTable:
    """All quotas of the cluster, to look up what applies to a client. Immutable."""

    def __init__(self, quotas: Iterable[tuple[QuotaEntity, Values]] = ()) -> None:
        self._clients: dict[str, dict[tuple[Part, ...], float]] = {key: {} for key in CLIENT_KEYS}
        self._addresses: dict[str | None, float] = {}
        for entity, values in quotas:
            for key, value in values.items():
                if key in IP_KEYS:
                    self._addresses[entity.parts[0][1]] = value
                elif key in self._clients:
                    self._clients[key][entity.parts] = value
        self.limits_requests = any(
            self._clients[key] for key in CLIENT_KEYS if key != QuotaKey.CONTROLLER_MUTATION_RATE
        )
        """Whether any quota needs a look at each request."""
        self.limits_addresses = bool(self._addresses)

    def limit(self, key: QuotaKey, user: str, client_id: str) -> Limit | None:
        """Return the limit that applies to a client, by Kafka's precedence, and the bucket that it is counted in."""
        values = self._clients[key]
        if not values:
            return None
        this_user, this_client = (EntityType.USER.value, user), (EntityType.CLIENT_ID.value, client_id)
        any_user, any_client = (EntityType.USER.value, None), (EntityType.CLIENT_ID.value, None)
        both, of_user, of_client = Bucket(user, client_id), Bucket(user, None), Bucket(None, client_id)
        candidates: tuple[tuple[tuple[Part, ...], Bucket], ...] = (
            ((this_user, this_client), both),
            ((this_user, any_client), both),
            ((this_user,), of_user),
            ((any_user, this_client), both),
            ((any_user, any_client), both),
            ((any_user,), of_user),
            ((this_client,), of_client),
            ((any_client,), of_client),
        )
        for parts, bucket in candidates:
            value = values.get(parts)
            if value is not None:
                return Limit(value, bucket)
        return None

    def connection_rate(self, address: str) -> float | None:
        """Return how many connections per second an address may open; None without a limit."""
        rate = self._addresses.get(address)
        return self._addresses.get(None) if rate is None else rate
