"""The clients under test and the broker that they talk to.

`CHRONIK_TEST_BOOTSTRAP=HOST:PORT` runs these tests against an existing cluster, such as Apache Kafka. This shows
whether a test expects what Kafka does, or only what we believe.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
from tests.clients.drivers.aio import Aiokafka, AiokafkaAdmin
from tests.clients.drivers.base import Admin, Client
from tests.clients.drivers.confluent import Confluent, ConfluentAdmin
from tests.clients.drivers.java import Java, JavaAdmin
from tests.clients.drivers.kafka_python import KafkaPython, KafkaPythonAdmin
from tests.clients.drivers.kcat import Kcat
from tests.support.node import Node

OUTSIDE_BOOTSTRAP = os.environ.get("CHRONIK_TEST_BOOTSTRAP")

PYTHON_CLIENTS: dict[str, Callable[[], Client]] = {
    "kafka-python": KafkaPython,
    "confluent-kafka": Confluent,
    "aiokafka": Aiokafka,
}

GetClient: TypeAlias = Callable[[str], Client]
NewName: TypeAlias = Callable[[str], str]


@pytest.fixture(scope="session")
def bootstrap(request: pytest.FixtureRequest) -> str:
    if OUTSIDE_BOOTSTRAP:
        return OUTSIDE_BOOTSTRAP
    node: Node = request.getfixturevalue("shared_node")
    return node.bootstrap


@pytest.fixture(scope="session")
def new_name() -> NewName:
    """Return names of topics and groups that no other test uses."""
    counter = itertools.count(1)
    run = os.urandom(3).hex()
    return lambda what: f"{what}-{run}-{next(counter)}"


@pytest.fixture
def topic(new_name: NewName) -> str:
    return new_name("topic")


@pytest.fixture(scope="session")
def get_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetClient]:
    """Return a client by name, created once; if a client is unavailable here, the test is skipped with the reason."""
    made: dict[str, Client] = {}
    jvms: list[Java] = []

    def get(name: str) -> Client:
        if name not in made:
            if name.startswith("java-"):
                version = name.removeprefix("java-")
                try:
                    java = Java(version, tmp_path_factory.mktemp(name))
                except FileNotFoundError as missing:
                    pytest.skip(str(missing))
                jvms.append(java)
                made[name] = java
            elif name == "kcat":
                if shutil.which("kcat") is None:
                    pytest.skip("kcat is not on the PATH: install the package kcat")
                made[name] = Kcat()
            else:
                made[name] = PYTHON_CLIENTS[name]()
        return made[name]

    yield get
    for java in jvms:
        java.jvm.close()


@pytest.fixture
def client(request: pytest.FixtureRequest, get_client: GetClient) -> Client:
    return get_client(request.param)


@pytest.fixture
def admin(request: pytest.FixtureRequest, get_client: GetClient, bootstrap: str) -> Iterator[Admin]:
    opened = open_admin(get_client, request.param, bootstrap)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def create_topic(bootstrap: str) -> Iterator[Callable[[str, int], None]]:
    """Create a topic for a test that is not about creating topics."""
    admin = ConfluentAdmin(bootstrap)
    yield admin.create_topic
    admin.close()


def open_admin(get_client: GetClient, name: str, bootstrap: str) -> Admin:
    client = get_client(name)
    if isinstance(client, Java):
        return JavaAdmin(client.jvm, bootstrap)
    admins: dict[str, Callable[[str], Admin]] = {
        "kafka-python": KafkaPythonAdmin,
        "confluent-kafka": ConfluentAdmin,
        "aiokafka": AiokafkaAdmin,
    }
    return admins[name](bootstrap)
