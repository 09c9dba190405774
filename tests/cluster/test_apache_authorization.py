"""Unauthorized requests get the same errors from a node and from Apache Kafka, in each version that both serve.

Both begin open (`allow.everyone.if.no.acl.found`). Then an ACL of another principal closes one type of resource after
the other: topics first, so that requests for several resources fail at each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import StartNode
from tests.node.support_authorization import (
    CASES,
    CLUSTER,
    GROUP,
    LAST,
    ORDERS,
    PAYMENTS,
    READERS,
    TOPIC,
    TRANSACTIONAL_ID,
    Case,
    Names,
)
from tests.node.support_wire import ConnectionEnded, WireClient
from tests.support.apache_kafka import ApacheKafka, missing
from tests.support.eventually import eventually

from chronik.authorization.acls import CLUSTER_NAME, Operation, PatternType, Permission, ResourceType
from chronik.node.api_table import APIS
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SETTINGS = """\
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
super.users=User:broker
listener.security.protocol.map=CONTROLLER:SASL_PLAINTEXT,PLAINTEXT:PLAINTEXT
sasl.mechanism.controller.protocol=PLAIN
listener.name.controller.sasl.enabled.mechanisms=PLAIN
listener.name.controller.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
username="broker" password="broker" user_broker="broker";
"""
"""The broker reaches the controller as a super user, because the clients' principal loses its rights."""

CLOSED = ((TOPIC, "*"), (GROUP, "*"), (TRANSACTIONAL_ID, "*"), (CLUSTER, CLUSTER_NAME))
AUTHORIZATION_ERRORS = {
    ErrorCode.topic_authorization_failed,
    ErrorCode.group_authorization_failed,
    ErrorCode.cluster_authorization_failed,
    ErrorCode.transactional_id_authorization_failed,
}


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[ApacheKafka]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    broker = ApacheKafka(tmp_path, SETTINGS)
    try:
        yield broker.start()
    finally:
        broker.stop()


class Side:
    """One of the two clusters."""

    def __init__(self, bootstrap: str) -> None:
        self._port = int(bootstrap.rpartition(":")[2])
        self.client = WireClient(self._port, timeout_s=60.0)
        api_versions = self.call(ApiKey.API_VERSIONS, 0, {})
        self.versions = {api.api_key: (api.min_version, api.max_version) for api in api_versions.api_keys}
        new = {"name": ORDERS, "num_partitions": 1, "replication_factor": 1}
        eventually(lambda: self._create({"topics": [new], "timeout": 10_000, "validate_only": False}), 30, "a topic")
        metadata = self.call(ApiKey.METADATA, 12, {"topics": [{"name": ORDERS, "topic_id": None}]})
        self.topic_id = metadata.topics[0].topic_id
        for key_type, key in ((0, READERS), (1, PAYMENTS)):
            eventually(partial(self._finds_coordinator, key_type, key), 30, "a coordinator")

    def _finds_coordinator(self, key_type: int, key: str) -> bool:
        response = self.call(ApiKey.FIND_COORDINATOR, 2, {"key": key, "key_type": key_type})
        return bool(response.error_code == ErrorCode.none)

    def close(self) -> None:
        self.client.socket.close()

    def _create(self, values: dict[str, Any]) -> bool:
        return self.call(ApiKey.CREATE_TOPICS, 7, values).topics[0].error_code in (0, ErrorCode.topic_already_exists)

    def call(self, key: ApiKey, version: int, values: dict[str, Any]) -> Any:
        try:
            return self.client.call(key, version, values)
        except (ConnectionEnded, ConnectionError) as error:
            self.client.socket.close()
            self.client = WireClient(self._port, timeout_s=60.0)
            return error

    def close_resources(self, resource_type: ResourceType, name: str) -> None:
        creation = {
            "resource_type": resource_type,
            "resource_name": name,
            "resource_pattern_type": PatternType.LITERAL,
            "principal": "User:somebody",
            "host": "*",
            "operation": Operation.ALL,
            "permission_type": Permission.ALLOW,
        }
        assert self.call(ApiKey.CREATE_ACLS, 3, {"creations": [creation]}).results[0].error_code == 0

    def outcome(self, key: ApiKey, version: int, case: Case) -> Any:
        """Return the authorization errors of the response, each with its place."""
        by_id = version >= case.by_id_from
        response = self.call(key, version, case.values(Names(version, topic_id=self.topic_id if by_id else None)))
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


def test_refusals_equal_those_of_apache_kafka(kafka: ApacheKafka, start_node: StartNode) -> None:
    node = start_node(authorization={"enabled": True, "allow_everyone_if_no_acl_found": True}, auto_create_topics=False)
    with closing(Side(node.bootstrap)) as ours, closing(Side(kafka.bootstrap)) as theirs:
        differences = list(differing(ours, theirs))
    assert not differences, "\n".join(differences)


def differing(ours: Side, theirs: Side) -> Iterator[str]:
    versions = {api.key: api.parsed_versions for api in APIS}
    for resource_type, name in CLOSED:
        for side in (ours, theirs):
            side.close_resources(resource_type, name)
        for key in (*(key for key in CASES if key not in LAST), *LAST):
            if key in (ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS) and resource_type is not CLUSTER:
                continue  # They are still allowed, and would change the ACLs.
            for number, case in enumerate(CASES[key]):
                if case is CASES[ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS][0]:
                    continue  # Kafka does not answer a refused request for all users: its error needs their list.
                if case is CASES[ApiKey.FETCH][1] and resource_type is not CLUSTER:
                    continue  # Kafka lets a client with CLUSTER_ACTION fetch as a replica; here only nodes may.
                lowest, highest = case.versions or versions[key]
                lowest = max(lowest, theirs.versions[key][0])
                highest = min(highest, theirs.versions[key][1])
                for version in range(lowest, highest + 1):
                    expected, outcome = theirs.outcome(key, version, case), ours.outcome(key, version, case)
                    if expected != outcome:
                        place = f"{resource_type.name} closed: {key.name} v{version} case {number}"
                        yield f"{place}: Kafka {expected}, node {outcome}"
