"""The campaign's intruder on one node: it is refused without rights, and it reports every right that it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.support_injector import CampaignNodes
from tests.faults.support_intruder import Intruder, Target
from tests.faults.support_security import STRANGER, ClusterSecurity
from tests.support.eventually import eventually

from chronik.authorization.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.cli.options import with_cluster
from chronik.client.acls import Acls

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> ClusterSecurity:
    return ClusterSecurity(tmp_path_factory.mktemp("security") / "files")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, security: ClusterSecurity) -> Iterator[CampaignNodes]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    with CampaignNodes(folder, 1, {}, security, None) as nodes:
        nodes.start_all()
        security.create_users(nodes)
        yield nodes


def test_a_node_refuses_all_that_the_intruder_tries(nodes: CampaignNodes, security: ClusterSecurity) -> None:
    with Intruder(security, nodes, Target(nodes.new_topic(1), "writer"), "1") as intruder:
        tried = {
            "wrong password",
            "no authentication",
            "no certificate",
            "produce",
            "write a marker",
            "list topics",
            "commit offsets in a transaction",
            "verify a transaction as a leader",
        }
        eventually(lambda: tried <= intruder.refused.keys(), TIMEOUT_S, "the intruder has tried everything")
    assert intruder.violations == []


def test_the_intruder_reports_a_right_that_it_should_not_have(nodes: CampaignNodes, security: ClusterSecurity) -> None:
    topic = nodes.new_topic(1)
    right = AclBinding(
        ResourceType.TOPIC, topic, PatternType.LITERAL, f"User:{STRANGER}", "*", Operation.READ, Permission.ALLOW
    )
    with_cluster(nodes.bootstrap, lambda online: Acls(online).create([right]))
    with (
        pytest.raises(AssertionError, match="fetch on node 1"),
        Intruder(security, nodes, Target(topic, "writer"), "1") as intruder,
    ):
        eventually(lambda: intruder.violations, TIMEOUT_S, "the intruder has read the topic")
    security.dismiss(nodes)


def test_the_intruder_reports_a_revoked_password_that_works(nodes: CampaignNodes, security: ClusterSecurity) -> None:
    security.change_passwords(nodes, clients_first=True)
    security.revoked.append((STRANGER, security.password(STRANGER)))
    with (
        pytest.raises(AssertionError, match="revoked password on node 1"),
        Intruder(security, nodes, Target(nodes.new_topic(1), "writer"), "2") as intruder,
    ):
        eventually(lambda: intruder.violations, TIMEOUT_S, "the intruder has logged in")
