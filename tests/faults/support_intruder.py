"""A hostile client beside the load: every node must refuse all that it tries, whatever happens to the cluster.

It guesses passwords, tries revoked ones, skips the authentication, connects to the internal listener, and as a user
without rights it writes, reads, commits, ends transactions with guessed producer ids and changes the cluster.
"""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.cluster.support_cluster import Nodes
from tests.cluster.support_workload import group_of
from tests.faults.support_security import CLIENTS, LOGIN_TIMEOUT_S, MECHANISM, STRANGER, ClusterSecurity
from tests.node.support_sasl import log_in
from tests.node.support_wire import ConnectionEnded, WireClient, batch, errors_of

from chronik.authorization.acls import Operation, PatternType, Permission, ResourceType
from chronik.local.errors import LocalClusterError
from chronik.local.node import LocalNode
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

PAUSE_S = 0.25
JOIN_TIMEOUT_S = 60.0
PRODUCER_IDS_GUESSED = 5_000
EPOCHS_GUESSED = 10
VIOLATIONS_MAX = 100
UNREACHABLE = (OSError, ConnectionEnded, LocalClusterError)  # the last: the node has left the cluster
REFUSALS = {
    ErrorCode.topic_authorization_failed,
    ErrorCode.group_authorization_failed,
    ErrorCode.cluster_authorization_failed,
    ErrorCode.transactional_id_authorization_failed,
}
UNAVAILABLE = {ErrorCode.request_timed_out, ErrorCode.not_controller}
"""No controller was reachable, which authorizes changes of the cluster: neither a refusal nor a success."""


@dataclass(frozen=True)
class Target:
    """What the intruder attacks: the topic and the transactions of a round."""

    topic: str
    transactional_id: str


class Intruder:
    """Two threads: one guesses its way in, the other one is a user without rights. A success is a violation."""

    def __init__(self, security: ClusterSecurity, nodes: Nodes, target: Target, seed: str) -> None:
        self.violations: list[str] = []
        self.refused: Counter[str] = Counter()
        self._security = security
        self._nodes = nodes
        self._target = target
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(act, random.Random(f"{seed} {name}")), name=name, daemon=True)
            for name, act in (("guesser", self._guess), ("stranger", self._trespass))
        ]

    def __enter__(self) -> Intruder:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads)
            assert self.violations == [], "\n".join(self.violations[:10])
            assert self.refused["wrong password"] and self.refused["produce"], f"it tried too little: {self.refused}"

    def _run(self, act: Callable[[LocalNode, random.Random], None], chance: random.Random) -> None:
        while not self._stop.is_set():
            try:
                node = chance.choice(list(self._nodes))
                act(node, chance)
            except UNREACHABLE:
                pass  # a fault, which is not a refusal and proves nothing
            except Exception as error:
                self._violated(f"unexpected: {error!r}")
            self._stop.wait(PAUSE_S)

    def _tried(self, what: str, node: LocalNode, is_refused: bool, answer: object) -> None:
        if is_refused:
            self.refused[what] += 1
        else:
            self._violated(f"{what} on node {node.id}: {answer}")

    def _violated(self, violation: str) -> None:
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(violation)

    # -- without a user ------------------------------------------------------------------------------------------------

    def _guess(self, node: LocalNode, chance: random.Random) -> None:
        kinds = (self._wrong_password, self._revoked_password, self._unauthenticated, self._no_certificate)
        chance.choice(kinds)(node, chance)

    def _wrong_password(self, node: LocalNode, chance: random.Random) -> None:
        user = chance.choice((*CLIENTS, "admin", "nobody"))
        self._try_password("wrong password", node, user, chance.choice(("", "admin", user, f"{chance.random()}")))

    def _revoked_password(self, node: LocalNode, chance: random.Random) -> None:
        if self._security.revoked:
            self._try_password("revoked password", node, *chance.choice(self._security.revoked))

    def _try_password(self, what: str, node: LocalNode, user: str, password: str) -> None:
        with self._security.connect(node, timeout_s=LOGIN_TIMEOUT_S) as client:
            answer = log_in(client, MECHANISM, user, password)
            self._tried(what, node, answer.error_code is ErrorCode.sasl_authentication_failed, f"{user}: {answer}")

    def _unauthenticated(self, node: LocalNode, chance: random.Random) -> None:
        with self._security.connect(node) as client:
            answer = None
            with suppress(ConnectionEnded, ConnectionResetError, ssl.SSLEOFError):
                answer = client.metadata()
            self._tried("no authentication", node, answer is None, answer)

    def _no_certificate(self, node: LocalNode, chance: random.Random) -> None:
        """Connect to the internal listener with TLS, without a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # the handshake itself reports the refusal
        with socket.create_connection(node.internal, LOGIN_TIMEOUT_S) as plain:
            try:
                context.wrap_socket(plain, server_hostname=node.internal.host).close()
            except ssl.SSLError:
                self.refused["no certificate"] += 1
            else:
                self._tried("no certificate", node, False, "the handshake succeeds")

    # -- as a user without rights --------------------------------------------------------------------------------------

    def _trespass(self, node: LocalNode, chance: random.Random) -> None:
        with self._security.log_in(node, STRANGER) as client:
            for what, attempt in self._attempts(chance):
                if self._stop.is_set():
                    return
                errors = attempt(client) - {ErrorCode.none}
                if not errors or not errors <= UNAVAILABLE:
                    self._tried(what, node, bool(errors) and errors <= REFUSALS, errors)
            answer = client.call(ApiKey.METADATA, 12, {"topics": None, "allow_auto_topic_creation": False})
            self._tried("list topics", node, not answer.topics, answer.topics)

    def _attempts(self, chance: random.Random) -> Iterator[tuple[str, Callable[[WireClient], set[ErrorCode]]]]:
        target = self._target
        topic, group, transactional_id = target.topic, group_of(target.topic), target.transactional_id
        guessed: dict[str, Any] = {
            "producer_id": chance.randrange(PRODUCER_IDS_GUESSED),
            "producer_epoch": chance.randrange(EPOCHS_GUESSED),
        }
        records = batch(b"forged", **guessed, base_sequence=chance.randrange(100))
        yield "produce", lambda client: {ErrorCode(client.produce(topic, batch(b"forged")).error_code)}
        yield "produce as another", lambda client: {ErrorCode(client.produce(topic, records).error_code)}
        yield "fetch", lambda client: {ErrorCode(client.fetch_one(topic).error_code)}
        partition = {"partition_index": 0, "committed_offset": 0, "committed_metadata": ""}
        topics = [{"name": topic, "partitions": [partition]}]
        marker = {
            **guessed,
            "transaction_result": True,
            "topics": [{"name": topic, "partition_indexes": [0]}],
            "coordinator_epoch": 0,
        }
        acl = {
            "resource_type": ResourceType.TOPIC,
            "resource_name": topic,
            "resource_pattern_type": PatternType.LITERAL,
            "principal": f"User:{STRANGER}",
            "host": "*",
            "operation": Operation.ALL,
            "permission_type": Permission.ALLOW,
        }
        credential = {
            "name": CLIENTS[0],
            "mechanism": 2,
            "iterations": 4096,
            "salt": b"s",
            "salted_password": bytes(64),
        }
        config = {"name": "min.insync.replicas", "config_operation": 0, "value": "1"}
        calls: tuple[tuple[str, ApiKey, int, Mapping[str, Any]], ...] = (
            ("metadata", ApiKey.METADATA, 12, {"topics": [{"name": topic}], "allow_auto_topic_creation": False}),
            ("commit offsets", ApiKey.OFFSET_COMMIT, 7, {"group_id": group, "topics": topics}),
            ("delete a group", ApiKey.DELETE_GROUPS, 2, {"groups_names": [group]}),
            ("leave a group", ApiKey.LEAVE_GROUP, 3, {"group_id": group, "members": [{"member_id": "m"}]}),
            (
                "take over a transactional id",
                ApiKey.INIT_PRODUCER_ID,
                4,
                {"transactional_id": transactional_id, "transaction_timeout": 10_000, **guessed},
            ),
            (
                "end a transaction",
                ApiKey.END_TXN,
                3,
                {"transactional_id": transactional_id, **guessed, "committed": True},
            ),
            (
                "join a transaction",
                ApiKey.ADD_PARTITIONS_TO_TXN,
                3,
                {
                    "v3_and_below_transactional_id": transactional_id,
                    "v3_and_below_producer_id": guessed["producer_id"],
                    "v3_and_below_producer_epoch": guessed["producer_epoch"],
                    "v3_and_below_topics": [{"name": topic, "partitions": [0]}],
                },
            ),
            (
                "add a group to a transaction",
                ApiKey.ADD_OFFSETS_TO_TXN,
                3,
                {"transactional_id": transactional_id, **guessed, "group_id": group},
            ),
            (
                "commit offsets in a transaction",
                ApiKey.TXN_OFFSET_COMMIT,
                chance.choice((3, 5)),
                {
                    "transactional_id": transactional_id,
                    **guessed,
                    "group_id": group,
                    "generation_id": -1,
                    "member_id": "",
                    "topics": topics,
                },
            ),
            (
                "verify a transaction as a leader",
                ApiKey.ADD_PARTITIONS_TO_TXN,
                5,
                {
                    "transactions": [
                        {
                            "transactional_id": transactional_id,
                            **guessed,
                            "verify_only": chance.random() < 0.5,
                            "topics": [{"name": topic, "partitions": [0]}],
                        }
                    ]
                },
            ),
            ("read producers", ApiKey.DESCRIBE_PRODUCERS, 0, {"topics": [{"name": topic, "partition_indexes": [0]}]}),
            ("read a transaction", ApiKey.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [transactional_id]}),
            ("write a marker", ApiKey.WRITE_TXN_MARKERS, 1, {"markers": [marker]}),
            ("delete a topic", ApiKey.DELETE_TOPICS, 5, {"topic_names": [topic], "timeout": 5_000}),
            (
                "delete records",
                ApiKey.DELETE_RECORDS,
                2,
                {"topics": [{"name": topic, "partitions": [{"partition_index": 0, "offset": -1}]}], "timeout": 5_000},
            ),
            (
                "change a config",
                ApiKey.INCREMENTAL_ALTER_CONFIGS,
                1,
                {"resources": [{"resource_type": 2, "resource_name": topic, "configs": [config]}]},
            ),
            ("add an ACL", ApiKey.CREATE_ACLS, 3, {"creations": [acl]}),
            (
                "change a password",
                ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
                0,
                {"deletions": [], "upsertions": [credential]},
            ),
        )
        for what, key, version, values in chance.sample(calls, len(calls)):
            yield what, partial(_errors, key, version, values)


def _errors(key: ApiKey, version: int, values: Mapping[str, Any], client: WireClient) -> set[ErrorCode]:
    return errors_of(client.call(key, version, values))
