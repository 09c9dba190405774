"""SASL on three nodes: credentials are altered through any node, and every node accepts them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from tests.node.support_sasl import log_in, write_users
from tests.node.support_wire import connect
from tests.node.test_scram_credentials import alter, deletion, describe, upsertion
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

APPLIED_S = 10.0


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    folder = tmp_path_factory.mktemp("sasl-cluster")
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("a-secret-of-the-test-with-enough-characters\n")
    sasl = {"users_file": write_users(folder / "users"), "failure_delay_ms": 0}
    nodes = [
        Node(folder / f"{node_id}", {"node_id": node_id, "security": {"protocol": "SASL_PLAINTEXT"}, "sasl": sasl})
        for node_id in (1, 2, 3)
    ]
    peers = [{"id": node.node_id, "internal": f"127.0.0.1:{node.internal_port}"} for node in nodes]
    for node in nodes:
        node.settings |= {"peers": peers, "cluster_secret_file": str(secret)}
    with ThreadPoolExecutor(len(nodes)) as threads:
        list(threads.map(Node.start, nodes))
    yield nodes
    for node in reversed(nodes):
        node.terminate()


def can_log_in(node: Node, user: str, password: str) -> bool:
    with connect(node) as client:
        return bool(log_in(client, user=user, password=password).error_code is ErrorCode.none)


def cannot_log_in(node: Node, user: str, password: str) -> bool:
    return not can_log_in(node, user, password)


def test_credentials_altered_through_any_node_hold_on_all(three: list[Node]) -> None:
    for number, through in enumerate(three):
        user = f"user-{number}"
        with connect(through) as client:
            log_in(client)
            assert alter(client, upsertions=[upsertion(user)]) == {user: (ErrorCode.none, None)}
            # The node that answered has applied it.
            assert describe(client, user)[user][0] is ErrorCode.none
        assert can_log_in(through, user, "secret")
        for node in three:
            eventually(partial(can_log_in, node, user, "secret"), APPLIED_S)
        with connect(through) as client:
            log_in(client)
            assert alter(client, deletions=[deletion(user)]) == {user: (ErrorCode.none, None)}
        for node in three:
            eventually(partial(cannot_log_in, node, user, "secret"), APPLIED_S)


@pytest.mark.parametrize("user", ["admin", "nobody"])
def test_salt_of_a_user_of_the_file_and_of_no_user_is_the_same_on_all_nodes(three: list[Node], user: str) -> None:
    """Otherwise a stranger would tell users from other names by comparing nodes."""
    salts = set()
    for node in three:
        with connect(node) as client:
            client.call(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": "SCRAM-SHA-512"})
            first = client.call(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": f"n,,n={user},r=abc".encode()})
            salts.add(first.auth_bytes.split(b",s=")[1])
    assert len(salts) == 1


def test_records_are_replicated_beneath_sasl_listeners(three: list[Node]) -> None:
    with connect(three[0]) as client:
        log_in(client)
        wanted = {"name": "replicated", "num_partitions": 3, "replication_factor": 3}
        created = client.call(ApiKey.CREATE_TOPICS, 7, {"topics": [wanted], "timeout": 10_000}).topics[0]
        assert created.error_code is ErrorCode.none
        # Batches for partitions that another node leads are forwarded to it.
        for partition in range(3):
            assert client.append("replicated", b"value", partition=partition) == 0
