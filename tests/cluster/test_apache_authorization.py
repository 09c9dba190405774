"""Each request gets the same refusals from a node and from Apache Kafka.

Both begin open (`allow.everyone.if.no.acl.found`). Then an ACL of alice closes one type of resource after the other to
everyone else: topics first, so that requests for several resources fail at each of them. Anonymous requests are
compared in each version that both serve. When all is closed, the last versions are compared on each listener: of
anonymous clients, of clients that have not authenticated, of eve, who has no rights, and of alice, who has all. Both
log in by password or by certificate. Compared are authorization errors with their places, and closed connections;
other errors depend on more than rights.
"""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import StartNode
from tests.node.support_authorization import (
    ANY_ACL,
    CASES,
    CLUSTER,
    GROUP,
    LAST,
    ORDERS,
    PAYMENTS,
    READERS,
    TELEMETRY,
    TOPIC,
    TRANSACTIONAL_ID,
    Case,
    Names,
    joins,
)
from tests.node.support_sasl import log_in, write_users
from tests.node.support_wire import ConnectionEnded, WireClient
from tests.support.apache_kafka import ApacheKafka, missing
from tests.support.certificates import Certificates
from tests.support.eventually import eventually
from tests.support.ports import free_ports

from chronik.authorization.acls import CLUSTER_NAME, Operation, PatternType, Permission, ResourceType
from chronik.node.api_table import APIS
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SETTINGS = """\
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
super.users=User:broker
listener.security.protocol.map=CONTROLLER:SASL_PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL
connection.failed.authentication.delay.ms=0
ssl.keystore.type=PEM
ssl.client.auth=requested
ssl.truststore.type=PEM
ssl.principal.mapping.rules={rule}
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.controller.protocol=PLAIN
listener.name.controller.sasl.enabled.mechanisms=PLAIN
listener.name.controller.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
username="broker" password="broker" user_broker="broker";
"""
"""The broker reaches the controller as a super user, because the clients' principal loses its rights."""
PLAIN_USERS = """\
listener.name.{listener}.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
user_alice="{alice}" user_eve="{eve}";
"""
PASSWORDS = {"alice": "alice-secret", "eve": "eve-secret"}
PROTOCOLS = ("SSL", "SASL_PLAINTEXT", "SASL_SSL")
"""Of the listeners beside PLAINTEXT, which are named after them."""
Ports = dict[str, int]
NOT_AUTHENTICATED = ""
RULE = r"RULE:^CN=([a-z]+)$/$1/,DEFAULT"
VISITORS: tuple[tuple[str, str | None], ...] = (
    ("SSL", None),
    ("SSL", "eve"),
    ("SSL", "alice"),
    ("SASL_PLAINTEXT", NOT_AUTHENTICATED),
    ("SASL_SSL", NOT_AUTHENTICATED),
    ("SASL_PLAINTEXT", "eve"),
    ("SASL_SSL", "eve"),
    ("SASL_PLAINTEXT", "alice"),
    ("SASL_SSL", "alice"),
)
"""A listener, and the user that logs in there, on SSL by certificate. The last one may remove resources."""

CLOSED = ((TOPIC, "*"), (GROUP, "*"), (TRANSACTIONAL_ID, "*"), (CLUSTER, CLUSTER_NAME))
REQUESTS = {**CASES, **TELEMETRY}
FIRST = tuple(key for key in REQUESTS if key not in LAST)
SERVED = {api.key: api.parsed_versions for api in APIS}
AUTHORIZATION_ERRORS = {
    ErrorCode.topic_authorization_failed,
    ErrorCode.group_authorization_failed,
    ErrorCode.cluster_authorization_failed,
    ErrorCode.transactional_id_authorization_failed,
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    for name in PASSWORDS:
        made.issue(name)
    (made.folder / "kafka.pem").write_bytes(
        (made.folder / "node.key").read_bytes() + made.folder.joinpath("node.pem").read_bytes()
    )
    return made


@pytest.fixture
def kafka_ports() -> Ports:
    return dict(zip(PROTOCOLS, free_ports(len(PROTOCOLS)), strict=True))


@pytest.fixture
def kafka(tmp_path: Path, certificates: Certificates, kafka_ports: Ports) -> Iterator[ApacheKafka]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    users = "".join(PLAIN_USERS.format(listener=name.lower(), **PASSWORDS) for name in PROTOCOLS if "SASL" in name)
    stores = {"keystore": certificates.folder / "kafka.pem", "truststore": certificates.authorities}
    files = "".join(f"ssl.{store}.location={path}\n" for store, path in stores.items())
    # A backslash of a properties file is doubled.
    settings = SETTINGS.format(rule=RULE.replace("\\", "\\\\"))
    broker = ApacheKafka(tmp_path, settings + users + files, kafka_ports)
    try:
        yield broker.start()
    finally:
        broker.stop()


class Side:
    """One of the two clusters."""

    def __init__(self, bootstrap: str, ports: Ports, certificates: Certificates) -> None:
        self._ports = {"PLAINTEXT": int(bootstrap.rpartition(":")[2]), **ports}
        self._certificates = certificates
        self._visitor: tuple[str, str | None] = ("PLAINTEXT", None)
        self.client = self._connect()
        api_versions = self.call(ApiKey.API_VERSIONS, 0, {})
        self.versions = {api.api_key: (api.min_version, api.max_version) for api in api_versions.api_keys}
        new = {"name": ORDERS, "num_partitions": 1, "replication_factor": 1}
        eventually(lambda: self._create({"topics": [new], "timeout": 10_000, "validate_only": False}), 30, "a topic")
        metadata = self.call(ApiKey.METADATA, 12, {"topics": [{"name": ORDERS, "topic_id": None}]})
        self.topic_id = metadata.topics[0].topic_id
        for key_type, key in ((0, READERS), (1, PAYMENTS)):
            eventually(partial(self._finds_coordinator, key_type, key), 30, "a coordinator")
        # A coordinator that is still loading refuses it, and then no listing would ever have this id.
        eventually(self._initializes_producer, 30, "a transactional id")
        for epoch in (0, -1):
            eventually(partial(self._heartbeats, epoch), 30, "a share group")

    def _connect(self) -> WireClient:
        listener, user = self._visitor
        client = WireClient(self._ports[listener], timeout_s=60.0)
        if listener.endswith("SSL"):
            context = self._certificates.client(user if listener == "SSL" else None)
            client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
        if user and listener != "SSL":
            assert log_in(client, "PLAIN", user, PASSWORDS[user]).error_code is ErrorCode.none
        return client

    def become(self, listener: str, user: str | None) -> None:
        """Send the next requests as this user to this listener."""
        self.client.socket.close()
        self._visitor = (listener, user)
        self.client = self._connect()

    def describes_orders(self) -> Any:
        return self.call(ApiKey.METADATA, 12, {"topics": [{"name": ORDERS, "topic_id": None}]})

    def _finds_coordinator(self, key_type: int, key: str) -> bool:
        response = self.call(ApiKey.FIND_COORDINATOR, 2, {"key": key, "key_type": key_type})
        return bool(response.error_code == ErrorCode.none)

    def _heartbeats(self, epoch: int) -> bool:
        response = self.call(ApiKey.SHARE_GROUP_HEARTBEAT, 1, joins(Names(1), epoch))
        return bool(response.error_code == ErrorCode.none)

    def _initializes_producer(self) -> bool:
        [case, *_] = CASES[ApiKey.INIT_PRODUCER_ID]
        response = self.call(ApiKey.INIT_PRODUCER_ID, 4, case.values(Names(4)))
        return bool(response.error_code == ErrorCode.none)

    def close(self) -> None:
        self.client.socket.close()

    def _create(self, values: dict[str, Any]) -> bool:
        return self.call(ApiKey.CREATE_TOPICS, 7, values).topics[0].error_code in (0, ErrorCode.topic_already_exists)

    def call(self, key: ApiKey, version: int, values: dict[str, Any]) -> Any:
        try:
            return self.client.call(key, version, values)
        except (ConnectionEnded, ConnectionError, ssl.SSLError) as error:
            self.client.socket.close()
            self.client = self._connect()
            return error

    def close_resources(self, resource_type: ResourceType, name: str) -> None:
        """Leave resources of this type to alice."""
        creation = {
            "resource_type": resource_type,
            "resource_name": name,
            "resource_pattern_type": PatternType.LITERAL,
            "principal": "User:alice",
            "host": "*",
            "operation": Operation.ALL,
            "permission_type": Permission.ALLOW,
        }
        assert self.call(ApiKey.CREATE_ACLS, 3, {"creations": [creation]}).results[0].error_code == 0
        eventually(
            partial(self._is_closed, resource_type), 30, "the broker has the ACL: Kafka's controller answers first"
        )

    def _is_closed(self, resource_type: ResourceType) -> bool:
        described = self.call(ApiKey.DESCRIBE_ACLS, 3, {**ANY_ACL, "resource_type_filter": resource_type})
        return bool(described.resources) or described.error_code is ErrorCode.cluster_authorization_failed

    def outcome(self, key: ApiKey, version: int, case: Case) -> Any:
        """Return the authorization errors of the response, each with its place."""
        by_id = version >= case.by_id_from
        names = Names(version, topic_id=self.topic_id if by_id else None)
        if case.before is not None:
            earlier, values = case.before
            self.call(earlier, version, values(names))
        response = self.call(key, version, case.values(names))
        if isinstance(response, Exception):
            return "closed"
        found = set(places(response))
        if case.listed is not None:
            found.add(("listed", case.listed in repr(response)))
        return found


def places(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, ErrorCode):
        if value in AUTHORIZATION_ERRORS:
            yield path, value.name
    elif isinstance(value, tuple):
        for each in value:
            yield from places(each, path)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from places(getattr(value, field.name), f"{path}.{field.name}")


@pytest.mark.timeout(400)
def test_refusals_equal_those_of_apache_kafka(
    kafka: ApacheKafka, kafka_ports: Ports, certificates: Certificates, start_node: StartNode, tmp_path: Path
) -> None:
    ports = dict(zip(PROTOCOLS, free_ports(len(PROTOCOLS)), strict=True))
    node = start_node(
        authorization={"enabled": True, "allow_everyone_if_no_acl_found": True},
        auto_create_topics=False,
        listeners=[{"name": each, "listen": f"127.0.0.1:{ports[each]}", "protocol": each} for each in PROTOCOLS],
        tls={**certificates.settings, "client_auth": "requested", "principal_mapping_rules": [RULE]},
        sasl={"mechanisms": ["PLAIN"], "users_file": write_users(tmp_path / "users", PASSWORDS)},
    )
    ours, theirs = Side(node.bootstrap, ports, certificates), Side(kafka.bootstrap, kafka_ports, certificates)
    with closing(ours), closing(theirs):
        differences = list(differing(ours, theirs))
        for visitor in VISITORS:
            for side in (ours, theirs):
                side.become(*visitor)
                described = side.describes_orders()
                is_refused = isinstance(described, Exception) or bool(set(places(described)))
                # Otherwise both sides could take a visitor for nobody.
                assert is_refused == (visitor[1] != "alice"), (visitor, described)
            differences += differing_for(visitor, ours, theirs, removes=visitor is VISITORS[-1])
    assert not differences, "\n".join(differences)


def differing(ours: Side, theirs: Side) -> Iterator[str]:
    for resource_type, name in CLOSED:
        for side in (ours, theirs):
            side.close_resources(resource_type, name)
        for key in (*FIRST, *LAST):
            if key in (ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS) and resource_type is not CLUSTER:
                continue  # They are still allowed, and would change the ACLs.
            for number, case in enumerate(REQUESTS[key]):
                if case is CASES[ApiKey.FETCH][1] and resource_type is not CLUSTER:
                    continue  # Kafka lets a client with CLUSTER_ACTION fetch as a replica; here only nodes may.
                for version in versions_of(key, case, theirs):
                    place = f"{resource_type.name} closed: {key.name} v{version} case {number}"
                    yield from compared(place, key, version, case, ours, theirs)


def differing_for(visitor: tuple[str, str | None], ours: Side, theirs: Side, *, removes: bool) -> Iterator[str]:
    listener, user = visitor
    has_rights = user == "alice"
    for key in (*FIRST, *(LAST if removes or not has_rights else ())):
        for number, case in enumerate(REQUESTS[key]):
            if has_rights and case is CASES[ApiKey.FETCH][1]:
                continue  # See above.
            version = max(versions_of(key, case, theirs))
            place = f"{listener} as {user or 'nobody'}: {key.name} v{version} case {number}"
            yield from compared(place, key, version, case, ours, theirs)


def versions_of(key: ApiKey, case: Case, theirs: Side) -> range:
    """Return the versions that both sides serve."""
    lowest, highest = case.versions or SERVED[key]
    # Kafka serves telemetry, but lists it only with a plugin that receives it.
    first, last = theirs.versions.get(key, SERVED[key]) if key in TELEMETRY else theirs.versions[key]
    return range(max(lowest, first), min(highest, last) + 1)


def compared(place: str, key: ApiKey, version: int, case: Case, ours: Side, theirs: Side) -> Iterator[str]:
    if case is CASES[ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS][0]:
        return  # Kafka does not answer a refused request for all users: its error needs their list.
    expected, outcome = theirs.outcome(key, version, case), ours.outcome(key, version, case)
    if expected != outcome and case.listed is not None:
        # Kafka loads the coordinators of a new topic after it has answered.
        with suppress(AssertionError):
            eventually(lambda: theirs.outcome(key, version, case) == outcome, 30, "Kafka lists the same")
        expected = theirs.outcome(key, version, case)
    if expected != outcome:
        yield f"{place}: Kafka {expected}, node {outcome}"
