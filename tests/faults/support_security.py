"""Security of the campaign's cluster: its certificates and authorities, the users of its clients, and their rights.

Each node has two listeners: the first one in plaintext, for the plaintext rounds and for the tests themselves, whose
anonymous principal is a super user; the other one with SASL_SSL, where each user has exactly the rights that it needs.
Nodes use TLS among each other in all rounds.
"""

from __future__ import annotations

import os
import secrets
import socket
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.support_cluster import Nodes
from tests.cluster.support_logins import Login, Logins
from tests.cluster.support_recorder import UNUSED_GROUPS
from tests.cluster.support_transaction_workload import transformers_of
from tests.cluster.support_workload import group_of
from tests.node.support_sasl import log_in, write_users
from tests.node.support_wire import ConnectionEnded, WireClient
from tests.support.eventually import eventually

from chronik.authorization.acl_filter import AclFilter
from chronik.authorization.acls import ANONYMOUS, AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.cli.options import with_cluster
from chronik.client.acls import Acls, filter_values
from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError
from chronik.client.properties import ClientSettings
from chronik.client.security import ClientSecurity
from chronik.client.users import Users
from chronik.local.certificates import Authority, create_authority
from chronik.local.node import LocalNode
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

LISTENER = "SECURED"
PORT_BELOW_KAFKA = 2_000
MECHANISM = "SCRAM-SHA-512"
ITERATIONS = 4_096
REAUTHENTICATE_MS = 8_000
ADMINISTRATOR, PRODUCER, CONSUMER, TRANSACTIONS, STRANGER = "admin", "producer", "consumer", "transactions", "mallory"
CLIENTS = (PRODUCER, CONSUMER, TRANSACTIONS)
AUTHORITIES_AHEAD = 12
"""A client reads its authorities once, when it starts. So the clients of a round trust the next ones, too: one for each
rotation that a round can have."""
WITNESS = "witness"
PROBE_TIMEOUT_S = 5.0
LOGIN_TIMEOUT_S = 20.0
"""The answer to a failed login is up to 10 s late."""
PROPAGATION_TIMEOUT_S = 60.0
UNAVAILABLE = (ClientError, KafkaError, OSError, ConnectionEnded)


class ClusterSecurity:
    """Certificates, users and ACLs. Owned by the main thread; `connect` and `log_in` may be called by any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authorities: list[Authority] = []
        self._current = 0
        folder.mkdir(parents=True)
        self._users_file = folder / "users"
        self._passwords = {name: _new_password() for name in (ADMINISTRATOR, STRANGER, *CLIENTS)}
        self.revoked: list[tuple[str, str]] = []
        """Users and earlier passwords, which every node must refuse."""
        self._logins: Logins | None = None
        write_users(self._users_file, {ADMINISTRATOR: self._passwords[ADMINISTRATOR]})
        self._extend_trust()
        self._write_node_authorities([0])

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def node_settings(self, node_id: int, host: str, port: int) -> dict[str, Any]:
        """Return the settings of a node whose first port is `port`, and issue its certificate if it has none."""
        certificate, key = self.certificate_of(node_id), self._folder / f"node-{node_id}.key"
        if not certificate.exists():
            self.issue(node_id, host)
        return {
            "listeners": [{"name": LISTENER, "listen": f"{host}:{port - PORT_BELOW_KAFKA}", "protocol": "SASL_SSL"}],
            "security": {"internal_tls": True, "insecure": True},  # the first listener; no other machine reaches it
            "tls": {"certificate": str(certificate), "key": str(key), "authorities": str(self._node_authorities)},
            "sasl": {
                "mechanisms": [MECHANISM],
                "users_file": str(self._users_file),
                "reauthenticate_ms": REAUTHENTICATE_MS,
            },
            "authorization": {"enabled": True, "super_users": [f"User:{ADMINISTRATOR}", ANONYMOUS]},
        }

    def certificate_of(self, node_id: int) -> Path:
        return self._folder / f"node-{node_id}.pem"

    @property
    def _node_authorities(self) -> Path:
        return self._folder / "authorities.pem"

    @property
    def _client_authorities(self) -> Path:
        return self._folder / "client-authorities.pem"

    # -- rotation of certificates --------------------------------------------------------------------------------------

    def trust_next(self) -> int:
        """Make the nodes trust the next authority besides the current one; return the current one's number."""
        self._write_node_authorities([self._current, self._current + 1])
        self._current += 1
        return self._current - 1

    def distrust_previous(self) -> None:
        self._write_node_authorities([self._current])

    def issue(self, node_id: int, host: str) -> None:
        """Write a new certificate of the current authority for a node, which loads it while it runs."""
        self._authorities[self._current].issue(self._folder, f"node-{node_id}", [host])

    def presents_newest(self, node: LocalNode) -> bool:
        """Return whether the node's listeners present the certificate that was last issued for it."""
        expected = ssl.PEM_cert_to_DER_cert(self.certificate_of(node.id).read_text())
        for port in (node.kafka.port - PORT_BELOW_KAFKA, node.internal.port):
            with self._handshake(node.kafka.host, port, self._current) as connection:
                if connection.getpeercert(binary_form=True) != expected:
                    return False
        return True

    def accepts(self, node: LocalNode, authority: int) -> bool:
        """Return whether the internal listener accepts a certificate of this authority."""
        try:
            self._handshake(node.internal.host, node.internal.port, authority).close()
        except ssl.SSLError:
            return False
        return True

    def _handshake(self, host: str, port: int, authority: int) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self._client_authorities))
        # With TLS 1.3, a refused client learns of it after the handshake.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        folder = self._authority_folder(authority)
        context.load_cert_chain(folder / f"{WITNESS}.pem", folder / f"{WITNESS}.key")
        plain = socket.create_connection((host, port), PROBE_TIMEOUT_S)
        try:
            return context.wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise

    def _extend_trust(self) -> None:
        """Let clients that start from now on trust the current authority and the next ones."""
        while len(self._authorities) <= self._current + AUTHORITIES_AHEAD:
            folder = self._authority_folder(len(self._authorities))
            authority = create_authority(folder)
            authority.issue(folder, WITNESS, [])
            self._authorities.append(authority)
        self._write_bundle(self._client_authorities, range(self._current, len(self._authorities)))

    def _write_node_authorities(self, authorities: Collection[int]) -> None:
        self._write_bundle(self._node_authorities, authorities)

    def _write_bundle(self, path: Path, authorities: Collection[int]) -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(self._authorities[index].certificate_path.read_text() for index in authorities))
        os.replace(fresh, path)

    def _authority_folder(self, number: int) -> Path:
        return self._folder / f"authority-{number}"

    # -- users ---------------------------------------------------------------------------------------------------------

    def password(self, name: str) -> str:
        return self._passwords[name]

    def create_users(self, nodes: Nodes) -> None:
        for name in (*CLIENTS, STRANGER):
            self._set_password(nodes, name, self._passwords[name])

    def change_passwords(self, nodes: Nodes, *, clients_first: bool) -> None:
        """Change the passwords of all clients. They receive theirs shortly before or after the cluster does."""
        for name in CLIENTS:
            password = _new_password()
            if clients_first:
                self._inform(name, password)
            self._set_password(nodes, name, password)
            self._inform(name, password)
            self.revoked.append((name, self._passwords[name]))
            self._passwords[name] = password

    def _inform(self, name: str, password: str) -> None:
        if self._logins is not None:
            {PRODUCER: self._logins.producer, CONSUMER: self._logins.consumer, TRANSACTIONS: self._logins.transactions}[
                name
            ].change_password(password)

    def _set_password(self, nodes: Nodes, name: str, password: str) -> None:
        """Create or change a user as the administrator, and wait until every node knows it."""
        self._administer(nodes, lambda online: Users(online).upsert(name, MECHANISM, password, ITERATIONS))

        def is_known() -> bool:
            return all(self.is_accepted(node, name, password) for node in nodes.responsive)

        eventually(is_known, PROPAGATION_TIMEOUT_S, f"all nodes know the password of {name}")

    def is_accepted(self, node: LocalNode, name: str, password: str) -> bool:
        with self.connect(node) as client:
            return log_in(client, MECHANISM, name, password).error_code is ErrorCode.none

    def connect(self, node: LocalNode, *, timeout_s: float = LOGIN_TIMEOUT_S) -> WireClient:
        """Connect to the secured listener, with TLS and without a user."""
        client = WireClient(node.kafka.port - PORT_BELOW_KAFKA, host=node.kafka.host, timeout_s=timeout_s)
        context = ssl.create_default_context(cafile=str(self._client_authorities))
        try:
            client.socket = context.wrap_socket(client.socket, server_hostname=node.kafka.host)
        except BaseException:
            client.socket.close()
            raise
        return client

    def log_in(self, node: LocalNode, name: str) -> WireClient:
        """Return a connection of a user with its current password."""
        client = self.connect(node)
        try:
            answer = log_in(client, MECHANISM, name, self._passwords[name])
            assert answer.error_code is ErrorCode.none, f"{name} is refused by node {node.id}: {answer}"
        except BaseException:
            client.socket.close()
            raise
        return client

    # -- rights --------------------------------------------------------------------------------------------------------

    def admit(self, nodes: Nodes, topic: str, transaction_topics: Sequence[str]) -> Logins:
        """Give the clients of a round the rights on its topics, groups and transactional ids that they need."""
        self._extend_trust()
        rights = list(_rights(topic, transaction_topics))
        self._administer(nodes, lambda online: Acls(online).create(rights))

        def is_known() -> bool:
            for node in nodes.responsive:
                with nodes.connect(node.id) as client:
                    listed = client.call(ApiKey.DESCRIBE_ACLS, 3, filter_values(AclFilter()))
                assert sum(len(resource.acls) for resource in listed.resources) == len(rights), f"node {node.id}"
            return True

        eventually(is_known, PROPAGATION_TIMEOUT_S, "all nodes know the rights of the clients")
        self._logins = Logins(*(self._login(nodes, name) for name in CLIENTS))
        return self._logins

    def dismiss(self, nodes: Nodes) -> None:
        """Remove all rights at the end of a round."""
        self._logins = None
        self._administer(nodes, lambda online: Acls(online).delete(AclFilter()))

    def _login(self, nodes: Nodes, name: str) -> Login:
        addresses = (node.kafka._replace(port=node.kafka.port - PORT_BELOW_KAFKA) for node in nodes)
        security = ClientSecurity(
            protocol="SASL_SSL",
            mechanism=MECHANISM,
            username=name,
            password=self._passwords[name],
            authorities=str(self._client_authorities),
        )
        return Login(ClientSettings(",".join(map(str, addresses)), security))

    def _administer(self, nodes: Nodes, change: Callable[[Cluster], Any]) -> None:
        """Make a change as the administrator. It is repeated if its outcome is unknown."""
        settings = self._login(nodes, ADMINISTRATOR).settings

        def is_done() -> bool:
            try:
                with_cluster(settings, change)
            except UNAVAILABLE as error:
                raise AssertionError(repr(error)) from None
            return True

        eventually(is_done, PROPAGATION_TIMEOUT_S, "the administrator's change is committed")


def _rights(topic: str, transaction_topics: Sequence[str]) -> list[AclBinding]:
    """Return the ACLs of the clients of one round. WRITE and READ imply DESCRIBE."""
    read, write, describe = Operation.READ, Operation.WRITE, Operation.DESCRIBE
    source, *_ = transaction_topics
    transformers = transformers_of(source)
    literal: Mapping[tuple[str, Operation, ResourceType], Sequence[str]] = {
        (PRODUCER, write, ResourceType.TOPIC): (topic, *transaction_topics),
        (CONSUMER, read, ResourceType.TOPIC): (topic, *transaction_topics),
        (CONSUMER, read, ResourceType.GROUP): (group_of(topic),),
        (CONSUMER, describe, ResourceType.GROUP): (transformers,),
        (TRANSACTIONS, write, ResourceType.TOPIC): transaction_topics,
        (TRANSACTIONS, read, ResourceType.TOPIC): (source,),
        (TRANSACTIONS, read, ResourceType.GROUP): (transformers,),
    }
    prefixed: Mapping[tuple[str, Operation, ResourceType], Sequence[str]] = {
        # librdkafka looks for the coordinator of its group, even if it never uses it.
        (CONSUMER, describe, ResourceType.GROUP): (UNUSED_GROUPS,),
        (TRANSACTIONS, write, ResourceType.TRANSACTIONAL_ID): (f"{source}-", f"{transformers}-"),
    }
    return [
        AclBinding(kind, name, pattern, f"User:{user}", "*", operation, Permission.ALLOW)
        for pattern, rights in ((PatternType.LITERAL, literal), (PatternType.PREFIXED, prefixed))
        for (user, operation, kind), names in rights.items()
        for name in names
    ]


def _new_password() -> str:
    return secrets.token_urlsafe(18)
