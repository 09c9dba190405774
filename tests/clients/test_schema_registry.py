"""The registry of real nodes: all answer and forward, Confluent's serializers work, a failover loses nothing."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.client.schema_registry import RegistryClient, RegistryError
from chronik.testing.cluster import TestCluster

AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "who", "type": "string"}],
}
JSON_SCHEMA = {"title": "Order", "type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


def urls(cluster: TestCluster) -> list[str]:
    return [f"http://{node.http}" for node in cluster.nodes]


def _has(answers: Callable[[str], set[tuple[int, bytes]]], path: str, expected: set[tuple[int, bytes]]) -> bool:
    return answers(path) == expected


def _has_subjects(client: RegistryClient, count: int) -> bool:
    return len(client.request("GET", "/subjects")) == count


def test_confluents_serializers_work_against_any_node(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1)
    writers = [SchemaRegistryClient({"url": url}) for url in urls(chronik_cluster)]
    context = SerializationContext(topic, MessageField.VALUE)
    order = {"id": 7, "who": "Ada"}
    producer = Producer({"bootstrap.servers": chronik_cluster.bootstrap})
    producer.produce(topic, AvroSerializer(writers[0], json.dumps(AVRO))(order, context))
    other = SerializationContext(f"{topic}-json", MessageField.VALUE)
    producer.produce(topic, JSONSerializer(json.dumps(JSON_SCHEMA), writers[1])({"id": 8}, other))
    assert producer.flush(30) == 0
    consumer = Consumer(
        {"bootstrap.servers": chronik_cluster.bootstrap, "group.id": topic, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    values: list[bytes] = []
    try:
        while len(values) < 2:
            message = consumer.poll(30)
            assert message is not None and message.error() is None
            value = message.value()
            assert value is not None
            values.append(value)
    finally:
        consumer.close()
    assert AvroDeserializer(writers[2])(values[0], context) == order
    reader = JSONDeserializer(json.dumps(JSON_SCHEMA), schema_registry_client=writers[0])
    assert reader(values[1], other) == {"id": 8}
    assert int.from_bytes(values[0][1:5], "big") != int.from_bytes(values[1][1:5], "big")


def _message_classes() -> tuple[Any, Any]:
    """Return the classes of a message and of one that it imports, as protoc generates them."""
    pool: Any = descriptor_pool.Default()
    inner: Any = descriptor_pb2.FileDescriptorProto(name="chronik_test/customer.proto", package="ct", syntax="proto3")
    inner.message_type.add(name="Customer").field.add(name="name", number=1, label=1, type=9)
    outer: Any = descriptor_pb2.FileDescriptorProto(name="chronik_test/order.proto", package="ct", syntax="proto3")
    outer.dependency.extend([inner.name, "google/protobuf/timestamp.proto"])
    timestamp_pb2.Timestamp()
    outer.message_type.add(name="Unused")
    order = outer.message_type.add(name="Order")
    order.field.add(name="id", number=1, label=1, type=3)
    order.field.add(name="who", number=2, label=1, type=11, type_name=".ct.Customer")
    order.field.add(name="at", number=3, label=1, type=11, type_name=".google.protobuf.Timestamp")
    for file in (inner, outer):
        pool.AddSerializedFile(file.SerializeToString())
    found = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ct.{name}")) for name in ("Order", "Customer")
    ]
    return found[0], found[1]


def test_confluents_protobuf_serializers_work_unchanged(chronik_cluster: TestCluster) -> None:
    order_class, customer_class = _message_classes()
    writers = [SchemaRegistryClient({"url": url}) for url in urls(chronik_cluster)]
    context = SerializationContext("protobuf-orders", MessageField.VALUE)
    order = order_class(id=7, who=customer_class(name="Ada"))
    order.at.FromSeconds(1_700_000_000)
    values = [
        ProtobufSerializer(order_class, writer, {"normalize.schemas": is_normal})(order, context)
        for writer in writers
        for is_normal in (False, True)
    ]
    for value, reader in zip(values, [*writers, *writers], strict=True):
        assert ProtobufDeserializer(order_class, {}, reader)(value, context) == order
    registered = writers[0].get_latest_version("protobuf-orders-value")
    assert registered.schema.schema_type == "PROTOBUF" and registered.schema.schema_str is not None
    assert [each.name for each in registered.schema.references or []] == ["chronik_test/customer.proto"]
    assert "message Order {" in registered.schema.schema_str
    # The order of messages is kept: a record names its message by its place.
    assert values[0] is not None and values[0][5:7] == b"\x02\x02"
    client = RegistryClient(urls(chronik_cluster))
    descriptors = client.descriptors(int.from_bytes(values[0][1:5], "big"))
    proto: Any = descriptor_pb2.FileDescriptorProto
    assert [proto.FromString(each).message_type[-1].name for each in descriptors.values()] == ["Customer", "Order"]


def test_contexts_keep_their_own_ids_and_subjects(shared_node: Node) -> None:
    client = RegistryClient(shared_node.http)
    first, second = ({"schema": f'{{"type":"fixed","name":"Ctx{n}","size":8}}'} for n in range(2))
    plain = client.request("POST", "/subjects/ctx-plain/versions", first)["id"]
    subject = quote(":.team:ctx-orders", safe="")
    inside = client.request("POST", f"/subjects/{subject}/versions", second)["id"]
    assert inside == 1, "the ids of a context are its own"
    assert client.request("GET", f"/schemas/ids/{inside}?subject={subject}")["schema"] == second["schema"]
    assert client.request("GET", f"/schemas/ids/{plain}")["schema"] == first["schema"]
    assert client.request("GET", "/subjects?subjectPrefix=:.team:") == [":.team:ctx-orders"]
    assert client.request("GET", "/contexts") == [".", ".team"]
    assert client.request("GET", f"/subjects/{subject}/versions/1")["subject"] == ":.team:ctx-orders"
    with pytest.raises(RegistryError) as refused:
        client.request("GET", "/subjects/ctx-orders/versions")
    assert (refused.value.status, refused.value.code) == (404, 40401)


def test_unknown_fields_and_parameters_are_ignored(shared_node: Node) -> None:
    client = RegistryClient(shared_node.http)
    body = {"schema": '"string"', "schemaType": "AVRO", "schemaTags": [], "ofTheFuture": {"x": [1]}}
    given = client.request("POST", "/subjects/unknown-fields/versions?ofTheFuture=1", body)["id"]
    assert client.request("POST", "/subjects/unknown-fields", body)["id"] == given
    config = {"compatibility": "FULL", "ofTheFuture": True}
    assert client.request("PUT", "/config/unknown-fields", config)["compatibility"] == "FULL"
    check = "/compatibility/subjects/unknown-fields/versions/latest?ofTheFuture=1"
    assert client.request("POST", check, body)["is_compatible"] is True


AVRO_FORMS = (
    '{"type":"fixed","name":"Normal","size":8,"owner":"x","area":"y","aliases":["B","A"]}',
    '{"type":"fixed","name":"Normal","size":8,"area":"y","owner":"x","aliases":["A","B"]}',
)
JSON_FORMS = (
    '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}',
    '{"properties":{"a":{"type":"integer"},"b":{"type":"string"}},"type":"object"}',
)


@pytest.mark.parametrize(("kind", "forms"), [("AVRO", AVRO_FORMS), ("JSON", JSON_FORMS)])
def test_normalize_finds_a_schema_that_is_written_in_another_form(
    shared_node: Node, kind: str, forms: tuple[str, str]
) -> None:
    client, subject = RegistryClient(shared_node.http), f"/subjects/normal-{kind}"
    first, second = ({"schema": form, "schemaType": kind} for form in forms)
    given = client.request("POST", f"{subject}/versions?normalize=true", first)["id"]
    assert client.request("POST", f"{subject}/versions?normalize=true", second)["id"] == given
    assert client.request("POST", f"{subject}?normalize=true", second)["version"] == 1
    assert client.request("GET", f"{subject}/versions") == [1]
    other = f"{subject}-as-written"
    ids = {client.request("POST", f"{other}/versions", each)["id"] for each in (first, second)}
    assert len(ids) == 2 and client.request("GET", f"{other}/versions") == [1, 2]


def test_every_node_answers_what_was_registered_at_another(chronik_cluster: TestCluster) -> None:
    clients = [RegistryClient(url) for url in urls(chronik_cluster)]
    ids = []
    for number, client in enumerate(clients):
        body = {"schema": json.dumps({"type": "fixed", "name": f"F{number}", "size": number + 1})}
        ids.append(client.request("POST", f"/subjects/s{number}/versions", body)["id"])
        # Other nodes catch up with the leader before they answer that an id does not exist.
        assert [other.schema(ids[-1]).kind for other in clients] == ["AVRO"] * 3
        assert [other.request("GET", f"/subjects/s{number}/versions") for other in clients] == [[1]] * 3
    assert sorted(ids) == [1, 2, 3]
    for client in clients:
        eventually(partial(_has_subjects, client, 3))
        with pytest.raises(RegistryError) as refused:
            client.request("GET", "/schemas/ids/99")
        assert (refused.value.status, refused.value.code) == (404, 40403)
        assert client.request("GET", "/config") == {"compatibilityLevel": "BACKWARD"}
        assert client.request("GET", "/schemas/types") == ["AVRO", "JSON", "PROTOBUF"]


def test_a_repeated_lookup_follows_every_change_on_every_node(chronik_cluster: TestCluster) -> None:
    client = RegistryClient(urls(chronik_cluster))
    with ExitStack() as open_connections:
        connections = [
            open_connections.enter_context(closing(http.client.HTTPConnection(str(node.http), timeout=30)))
            for node in chronik_cluster.nodes
        ]

        def answers(path: str) -> set[tuple[int, bytes]]:
            found = set()
            for connection in connections:
                for _ in range(3):
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    found.add((answer.status, answer.read()))
            return found

        versions, by_id = "/subjects/kept/versions", "/schemas/ids/1/versions"
        for number, listed in enumerate((b"[1]", b"[1,2]", b"[1,2,3]")):
            client.request("POST", versions, {"schema": f'{{"type":"fixed","name":"F","size":8,"n":{number}}}'})
            eventually(partial(_has, answers, versions, {(200, listed)}))
        assert answers(by_id) == {(200, b'[{"subject":"kept","version":1}]')}
        client.request("DELETE", "/subjects/kept")
        eventually(lambda: {status for status, _ in answers(versions)} == {404})
        client.request("DELETE", "/subjects/kept?permanent=true")
        eventually(lambda: {status for status, _ in answers(by_id)} == {404})


def test_schemas_with_references_are_read_whole(chronik_cluster: TestCluster) -> None:
    client = RegistryClient(urls(chronik_cluster))
    inner = {"type": "record", "name": "n.Inner", "fields": []}
    client.request("POST", "/subjects/a%2Fb/versions", {"schema": json.dumps(inner)})
    body = {
        "schema": json.dumps({"type": "array", "items": "n.Inner"}),
        "references": [{"name": "n.Inner", "subject": "a/b", "version": 1}],
    }
    number = client.request("POST", "/subjects/outer/versions", body)["id"]
    schema = client.schema(number)
    assert [(each.name, json.loads(each.schema.text)["name"]) for each in schema.flat()] == [("n.Inner", "Inner")]
    assert client.request("GET", "/subjects/a%2Fb/versions/latest/referencedby") == [number]
    with pytest.raises(RegistryError, match="references exist"):
        client.request("DELETE", "/subjects/a%2Fb")


def test_a_failover_gives_no_id_twice_and_loses_none(chronik_cluster: TestCluster) -> None:
    addresses = urls(chronik_cluster)
    registered: list[tuple[int, str]] = []
    failures: list[Exception] = []
    is_over = threading.Event()
    RegistryClient(addresses).request("POST", "/subjects/first/versions", {"schema": '"string"'})

    def register(worker: int) -> None:
        # Each client prefers another node, and uses the next one while that is down.
        client = RegistryClient(addresses[worker:] + addresses[:worker])
        number = 0
        while not is_over.is_set() or number < 5:
            name = f"R{worker}x{number}"
            schema = json.dumps({"type": "fixed", "name": name, "size": 1})
            try:
                answer: dict[str, Any] = client.request("POST", f"/subjects/{name}/versions", {"schema": schema})
            except RegistryError as error:
                if error.status and error.status < 500:
                    failures.append(error)
                    return
                continue
            registered.append((answer["id"], name))
            number += 1

    threads = [threading.Thread(target=register, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(registered) > 10, timeout_s=60)
        chronik_cluster.kill(chronik_cluster.leader("_schemas"))
        count = len(registered)
        eventually(lambda: len(registered) > count + 10, timeout_s=60)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    chronik_cluster.heal()
    ids = [number for number, _ in registered]
    assert len(set(ids)) == len(ids)
    for address in addresses:
        client = RegistryClient(address)
        for number, name in registered:
            assert json.loads(client.schema(number).text)["name"] == name
            assert client.request("GET", f"/subjects/{name}/versions") == [1]


def test_the_schema_client_of_confluent_manages_subjects(chronik_cluster: TestCluster) -> None:
    client = SchemaRegistryClient({"url": urls(chronik_cluster)[1]})
    first = client.register_schema("s", Schema('"string"', "AVRO"))
    assert client.get_schema(first).schema_str == '"string"'
    assert client.get_latest_version("s").version == 1
    assert client.get_subjects() == ["s"]
    assert client.lookup_schema("s", Schema('"string"', "AVRO")).schema_id == first
    assert not client.test_compatibility("s", Schema('"int"', "AVRO"))
    client.set_compatibility("s", "NONE")
    assert client.get_compatibility("s") == "NONE"
    client.register_schema("s", Schema('"int"', "AVRO"))
    assert client.get_versions("s") == [1, 2]
    assert client.delete_version("s", 1) == 1
    assert client.delete_subject("s") == [2]
    assert client.delete_subject("s", permanent=True) == [1, 2]
    assert client.get_subjects() == []


def _key(keytype: str, subject: str | None = None, magic: int = 0, **more: Any) -> bytes:
    return json.dumps({"keytype": keytype, "subject": subject, **more, "magic": magic}).encode()


def _schema(subject: str, version: int, schema_id: int, schema: str, **more: Any) -> tuple[bytes, bytes]:
    value = {"subject": subject, "version": version, "id": schema_id, "md5": "Lw==", "schema": schema, "deleted": False}
    return _key("SCHEMA", subject, 1, version=version), json.dumps({**value, **more}).encode()


OTHERS_RECORDS: tuple[tuple[bytes, bytes | None], ...] = (
    (b'{"keytype":"NOOP","magic":0}', None),
    (_key("CONFIG"), b'{"compatibilityLevel":"FULL","compatibilityGroup":"v","overrideMetadata":{"properties":{}}}'),
    _schema("orders-value", 1, 100, '"string"'),
    _schema("orders-value", 2, 101, '"bytes"', metadata={"properties": {"owner": "x"}}, guid="0-1", ts=5, offset=7),
    _schema("orders-value", 2, 101, '"bytes"', metadata={"properties": {"owner": "x"}}, deleted=True),
    _schema("inner", 1, 102, '{"type":"record","name":"n.Inner","fields":[]}'),
    _schema(
        "outer",
        1,
        103,
        '{"type":"array","items":"n.Inner"}',
        schemaType="AVRO",
        references=[{"name": "n.Inner", "subject": "inner", "version": 1}],
        ruleSet={"migrationRules": [], "domainRules": []},
        schemaTags=[],
    ),
    _schema("json-value", 1, 104, '{"type":"object"}', schemaType="JSON", references=[]),
    _schema("old-value", 1, 105, '"int"'),
    _schema("old-value", 2, 106, '"long"'),
    (_key("DELETE_SUBJECT", "old-value"), b'{"subject":"old-value","version":2}'),
    _schema("old-value", 3, 107, '"float"'),
    _schema("gone-value", 1, 108, '"double"', deleted=True),
    (_key("SCHEMA", "gone-value", 1, version=1), None),
    _schema("cleared-value", 1, 109, '"boolean"'),
    (_key("CLEAR_SUBJECT", "cleared-value"), b'{"subject":"cleared-value"}'),
    _schema("cleared-value", 1, 110, '"null"'),
    (_key("CLEAR_SUBJECT", "cleared-value"), None),
    (
        b'{"keytype":"CONTEXT","tenant":"default","context":".team","magic":0}',
        b'{"tenant":"default","context":".team"}',
    ),
    _schema(":.team:orders-value", 1, 1, '"int"'),
    (_key("CONFIG", "orders-value"), b'{"subject":"orders-value","compatibilityLevel":"NONE","alias":null}'),
    (_key("CONFIG", "json-value"), b'{"subject":"json-value","compatibilityLevel":"FORWARD"}'),
    (_key("CONFIG", "json-value"), None),
    (_key("MODE", "json-value"), b'{"subject":"json-value","mode":"READONLY"}'),
    (_key("MODE"), b'{"mode":"READWRITE"}'),
    (_key("OF_THE_FUTURE", "orders-value"), b'{"subject":"orders-value"}'),
    (_key("OF_THE_FUTURE", "orders-value"), None),
    (
        b'{"keytype":"SCHEMA","subject":"ancient","version":1,"magic":0}',
        b'{"subject":"ancient","version":1,"id":111,"schema":"\\"int\\""}',
    ),
)
"""What another registry with Confluent's format has in its topic: every type of key, tombstones and unknown fields."""


def test_the_topic_of_another_registry_is_taken_over_as_it_is(node: Node) -> None:
    admin = AdminClient({"bootstrap.servers": node.bootstrap})
    topic = NewTopic("_schemas", 1, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([topic])["_schemas"].result(30)
    producer = Producer({"bootstrap.servers": node.bootstrap, "enable.idempotence": True})
    for key, value in OTHERS_RECORDS:
        producer.produce("_schemas", value, key)
    assert producer.flush(30) == 0
    client = RegistryClient(node.http)

    def found(path: str) -> Any:
        return client.request("GET", path)

    live = [
        ":.team:orders-value",
        "ancient",
        "cleared-value",
        "inner",
        "json-value",
        "old-value",
        "orders-value",
        "outer",
    ]
    assert found("/subjects?subjectPrefix=:*:") == live
    assert found("/contexts") == [".", ".team"]
    assert found("/config") == {
        "compatibilityLevel": "FULL",
        "compatibilityGroup": "v",
        "overrideMetadata": {"properties": {}},
    }
    assert found("/config/orders-value")["compatibilityLevel"] == "NONE"
    assert found("/config/json-value?defaultToGlobal=true")["compatibilityLevel"] == "FULL"
    assert found("/mode") == {"mode": "READWRITE"} and found("/mode/json-value") == {"mode": "READONLY"}
    assert found("/subjects/orders-value/versions") == [1]
    assert found("/subjects/orders-value/versions?deleted=true") == [1, 2]
    assert found("/schemas/ids/101") == {"schema": '"bytes"', "metadata": {"properties": {"owner": "x"}}}
    assert found("/subjects/old-value/versions") == [3] and found("/schemas/ids/106")["schema"] == '"long"'
    assert found("/schemas/ids/110")["schema"] == '"null"' and found("/schemas/ids/111")["schema"] == '"int"'
    assert found("/schemas/ids/1?subject=:.team:orders-value")["schema"] == '"int"'
    assert found("/schemas/ids/104")["schemaType"] == "JSON"
    assert [json.loads(each.schema.text)["name"] for each in client.schema(103).flat()] == ["n.Inner"]
    for schema_id in (108, 109):
        with pytest.raises(RegistryError) as missing:
            found(f"/schemas/ids/{schema_id}")
        assert missing.value.code == 40403
    with pytest.raises(RegistryError) as refused:
        client.request("POST", "/subjects/json-value/versions", {"schema": '{"type":"string"}', "schemaType": "JSON"})
    assert refused.value.code == 42205
    # Known schemas keep their ids, and new ones get ids above all of them.
    assert client.request("POST", "/subjects/orders-value/versions", {"schema": '"string"'})["id"] == 100
    assert client.request("POST", "/subjects/orders-value/versions", {"schema": '"double"'})["id"] == 112
    context = SerializationContext("orders", MessageField.VALUE)
    reader = AvroDeserializer(SchemaRegistryClient({"url": node.http}))
    assert reader(b"\0" + (100).to_bytes(4, "big") + b"\x04hi", context) == "hi"
