"""Commands give ids, versions and Confluent's error codes; the records that they return rebuild the same state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.schemas.commands import REFERENCES_MAX, Command, run
from chronik.schemas.errors import Code, Refused
from chronik.schemas.state import Record, State


class Registry:
    """A state and the log of its records."""

    def __init__(self) -> None:
        self.state = State()
        self.log: list[Record] = []

    def run(self, name: str, subject: str = "", /, **arguments: Any) -> Any:
        outcome = run(self.state, Command(name, subject, arguments))
        for record in outcome.records:
            self.log.append(record)
            self.state.apply(*record)
        return outcome.answer

    def register(self, subject: str, schema: Any, kind: str = "AVRO", **more: Any) -> int:
        body = {"schema": json.dumps(schema), "schemaType": kind, **more}
        return int(self.run("register", subject, body=body)["id"])

    def fails(self, code: Code, name: str, subject: str = "", /, **arguments: Any) -> str:
        with pytest.raises(Refused) as refused:
            self.run(name, subject, **arguments)
        assert refused.value.code == code
        return refused.value.message


def record(*names: str, **defaults: Any) -> dict[str, Any]:
    fields = [{"name": name, "type": "string", **({"default": ""} if name in defaults else {})} for name in names]
    return {"type": "record", "name": "R", "fields": fields}


def test_a_schema_has_one_id_in_all_subjects_of_a_context() -> None:
    registry = Registry()
    assert registry.register("a", "string") == 1
    assert registry.register("b", "string") == 1
    assert registry.register("a", "string") == 1
    assert registry.register("b", "string", "AVRO") == 1
    assert registry.register("c", "int") == 2
    assert registry.register(":.ctx:a", "long") == 1
    assert [each.version for each in registry.state.versions("a")] == [1]


def test_records_have_the_format_of_confluent() -> None:
    registry = Registry()
    registry.register("s", "string")
    registry.run("set_config", "s", body={"compatibility": "FULL"})
    registry.run("set_config", body={"compatibility": "none"})
    registry.run("delete_subject", "s")
    assert registry.log == [
        (
            b'{"keytype":"SCHEMA","subject":"s","version":1,"magic":1}',
            b'{"subject":"s","version":1,"id":1,"schema":"\\"string\\"","deleted":false}',
        ),
        (b'{"keytype":"CONFIG","subject":"s","magic":0}', b'{"subject":"s","compatibilityLevel":"FULL"}'),
        (b'{"keytype":"CONFIG","magic":0}', b'{"compatibilityLevel":"NONE"}'),
        (b'{"keytype":"DELETE_SUBJECT","subject":"s","magic":0}', b'{"subject":"s","version":1}'),
    ]


def test_records_of_another_registry_are_read_and_unknown_ones_skipped() -> None:
    state = State()
    state.apply(b'{"keytype":"NOOP","magic":0}', None)
    state.apply(b"not json", b"{}")
    state.apply(
        b'{"keytype":"SCHEMA","subject":"t-value","version":3,"magic":1}',
        b'{"subject":"t-value","version":3,"id":77,"md5":"x","schema":"\\"int\\"","deleted":false,"new":1}',
    )
    version = state.version("t-value", -1)
    assert version is not None
    assert (version.version, version.id, state.last_ids[""]) == (3, 77, 77)
    assert state.unreadable == 1


def test_a_damaged_record_is_skipped_and_leaves_the_registry_usable() -> None:
    registry = Registry()
    registry.register("s", "string")
    key = b'{"keytype":"SCHEMA","subject":"s","version":1,"magic":1}'
    damaged: tuple[tuple[bytes | None, bytes | None], ...] = (
        (None, None),
        (b"[]", b"{}"),
        (b'{"keytype":"SCHEMA","subject":7,"version":1}', b'{"id":1,"schema":"{}"}'),
        (b'{"keytype":"SCHEMA","subject":"s","version":9999999999}', b'{"id":1,"schema":"{}"}'),
        (key, b'{"id":9223372036854775807,"schema":"{}"}'),
        (key, b'{"id":-1,"schema":"{}"}'),
        (key, b'{"id":1}'),
        (key, b'{"id":1,"schema":"{}","references":[{"name":"x"}]}'),
        (key, b"[" * 100_000),
        (b'{"keytype":"CONFIG","subject":"s","magic":0}', b"[]"),
        (b'{"keytype":"CONFIG","magic":0}', b'"FULL"'),
        (b'{"keytype":"MODE","magic":0}', b"{}"),
        (b'{"keytype":"DELETE_SUBJECT","subject":"s","magic":0}', b'{"subject":"s","version":"x"}'),
    )
    for record_key, value in damaged:
        registry.state.apply(record_key, value)
    assert registry.state.unreadable == len(damaged)
    assert registry.state.config("s", "compatibilityLevel", "BACKWARD") == "BACKWARD"
    assert [each.id for each in registry.state.versions("s")] == [1]
    assert registry.register("t", "int") == 2


@pytest.mark.parametrize(
    ("level", "accepts_new_field", "accepts_default", "accepts_removal"),
    [
        ("NONE", True, True, True),
        ("BACKWARD", False, True, True),
        ("FORWARD", True, True, False),
        ("FULL", False, True, False),
    ],
)
def test_levels_accept_the_changes_that_they_name(
    level: str, accepts_new_field: bool, accepts_default: bool, accepts_removal: bool
) -> None:
    for names, defaults, is_accepted in (
        (("a", "b"), {}, accepts_new_field),
        (("a", "b"), {"b": ""}, accepts_default),
        ((), {}, accepts_removal),
    ):
        registry = Registry()
        registry.run("set_config", body={"compatibility": level})
        registry.register("s", record("a"))
        body = {"schema": json.dumps(record(*names, **defaults))}
        assert registry.run("check", "s", body=body) == {"is_compatible": is_accepted}
        if is_accepted:
            registry.run("register", "s", body=body)
        else:
            registry.fails(Code.INCOMPATIBLE, "register", "s", body=body)


def test_transitive_levels_compare_all_versions() -> None:
    registry = Registry()
    registry.register("s", record("a"))
    registry.register("s", record("a", "b", b=""))
    body = {"schema": json.dumps(record("a", "b"))}
    assert registry.run("check", "s", body=body)["is_compatible"]
    registry.run("set_config", "s", body={"compatibility": "BACKWARD_TRANSITIVE"})
    assert not registry.run("check", "s", body=body)["is_compatible"]
    assert registry.run("check", "s", body=body, verbose=True)["messages"]


def test_deletion_is_soft_first_and_then_permanent() -> None:
    registry = Registry()
    registry.fails(Code.SUBJECT_NOT_FOUND, "delete_subject", "s")
    first = registry.register("s", "string")
    registry.run("set_config", "s", body={"compatibility": "NONE"})
    registry.register("s", "int")
    registry.fails(Code.VERSION_NOT_SOFT_DELETED, "delete_version", "s", version=1, permanent=True)
    assert registry.run("delete_version", "s", version=1) == 1
    registry.fails(Code.VERSION_SOFT_DELETED, "delete_version", "s", version=1)
    registry.fails(Code.SUBJECT_NOT_SOFT_DELETED, "delete_subject", "s", permanent=True)
    assert registry.run("delete_subject", "s") == [2]
    registry.fails(Code.SUBJECT_SOFT_DELETED, "delete_subject", "s")
    # A soft-deleted schema keeps its id, and comes back as a new version.
    assert registry.state.by_id(first) is not None
    assert registry.register("s", "string") == first
    assert [each.version for each in registry.state.versions("s")] == [3]
    registry.run("delete_subject", "s")
    assert registry.run("delete_subject", "s", permanent=True) == [1, 2, 3]
    assert registry.state.by_id(first) is None
    assert registry.state.configs == {}
    assert registry.register("s", "string") == 3


def test_a_referenced_version_cannot_be_deleted() -> None:
    registry = Registry()
    registry.register("other", {"type": "record", "name": "n.O", "fields": []})
    reference = {"name": "n.O", "subject": "other", "version": 1}
    registry.register("s", {"type": "array", "items": "n.O"}, references=[reference])
    registry.fails(Code.REFERENCE_EXISTS, "delete_version", "other", version=1)
    registry.fails(Code.REFERENCE_EXISTS, "delete_subject", "other")
    body = {"schema": '"string"', "references": [{**reference, "version": 9}]}
    registry.fails(Code.INVALID_SCHEMA, "register", "t", body=body)


def test_ids_are_imported_only_in_import_mode() -> None:
    registry = Registry()
    body = {"schema": '"string"', "id": 42, "version": 7}
    registry.fails(Code.NOT_PERMITTED, "register", "s", body=body)
    registry.run("set_mode", "s", body={"mode": "IMPORT"})
    assert registry.run("register", "s", body=body)["id"] == 42
    registry.fails(Code.NOT_PERMITTED, "register", "s", body={"schema": '"int"', "id": 42})
    registry.run("set_mode", "s", body={"mode": "READONLY"})
    registry.fails(Code.NOT_PERMITTED, "register", "s", body={"schema": '"int"'})
    assert registry.register("t", "int") == 43


def test_wrong_requests_have_the_codes_of_confluent() -> None:
    registry = Registry()
    registry.fails(Code.INVALID_SCHEMA, "register", "s", body={"schema": "{"})
    registry.fails(Code.INVALID_SCHEMA, "register", "s", body={"schema": ""})
    registry.fails(Code.INVALID_SCHEMA, "register", "s", body={"schema": "{}", "schemaType": "THRIFT"})
    registry.fails(Code.INVALID_COMPATIBILITY, "set_config", body={"compatibility": "SOME"})
    registry.fails(Code.INVALID_MODE, "set_mode", body={"mode": "SOME"})
    registry.fails(Code.SUBJECT_NOT_FOUND, "lookup", "s", body={"schema": '"int"'})
    registry.register("s", "string")
    registry.fails(Code.SCHEMA_NOT_FOUND, "lookup", "s", body={"schema": '"int"'})
    assert registry.run("lookup", "s", body={"schema": '{"type": "string"}'})["version"] == 1


COMMANDS = st.lists(
    st.tuples(
        st.sampled_from(["register", "delete_version", "delete_subject", "purge"]),
        st.sampled_from(["a", "b", ":.c:a"]),
        st.sampled_from(["int", "long", "string", "bytes"]),
    ),
    max_size=30,
)


@given(COMMANDS)
def test_an_id_has_one_schema_and_the_log_rebuilds_the_state(commands: list[tuple[str, str, str]]) -> None:
    registry = Registry()
    registry.run("set_config", body={"compatibility": "NONE"})
    schemas: dict[tuple[bool, int], str] = {}
    for name, subject, schema in commands:
        try:
            if name == "register":
                number = registry.register(subject, schema)
                assert schemas.setdefault((subject.startswith(":"), number), schema) == schema
            elif name == "delete_version":
                registry.run(name, subject, version=-1)
            else:
                registry.run("delete_subject", subject, permanent=name == "purge")
        except Refused as refused:
            assert refused.status in (404, 422)
    replayed = State()
    for record in registry.log:
        replayed.apply(*record)
    assert replayed.subjects == registry.state.subjects
    assert replayed.ids == registry.state.ids
    assert replayed.unreadable == 0


def test_an_imported_id_leaves_ids_for_new_schemas() -> None:
    registry = Registry()
    registry.run("set_mode", "imported", body={"mode": "IMPORT"})
    body = {"schema": '"double"', "version": 8}
    message = registry.fails(Code.NOT_PERMITTED, "register", "imported", body={**body, "id": 2**31 - 1})
    assert "no ids would be left" in message
    assert registry.run("register", "imported", body={**body, "id": 2_000_000_000})["id"] == 2_000_000_000
    assert registry.register("other", "bytes") == 2_000_000_001


@pytest.mark.parametrize(
    "body",
    [
        {"schema": "\ud800"},
        {"schema": '"string"', "metadata": {"properties": {"a": "\ud800"}}},
        {"schema": '{"type": "fixed", "name": "F", "size": 1, "doc": "\\ud800"}'},
        {"schema": '{"title": "\\ud800"}', "schemaType": "JSON"},
    ],
)
def test_half_of_a_surrogate_pair_is_refused(body: dict[str, Any]) -> None:
    Registry().fails(Code.INVALID_SCHEMA, "register", "s", body=body)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"minimum": NaN}', "NaN is not a JSON number"),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, "nested too deeply"),
        ("{", "is not JSON"),
    ],
)
def test_a_json_schema_that_cannot_be_read_has_the_reason(text: str, reason: str) -> None:
    message = Registry().fails(Code.INVALID_SCHEMA, "register", "s", body={"schema": text, "schemaType": "JSON"})
    assert reason in message


def test_settings_need_a_valid_subject_and_a_setting() -> None:
    registry = Registry()
    registry.fails(Code.INVALID_SUBJECT, "set_config", "\0", body={"compatibility": "NONE"})
    registry.fails(Code.INVALID_COMPATIBILITY, "set_config", "s", body={})
    registry.run("set_mode", "s", body={"mode": "READONLY"})
    assert registry.fails(Code.NOT_PERMITTED, "register", "s", body={"schema": '"int"'}) == (
        "Subject s is in read-only mode"
    )


def test_the_version_of_a_reference_is_a_number() -> None:
    registry = Registry()
    registry.register("a", record("x"))
    reference = {"name": "R", "subject": "a", "version": True}
    registry.fails(Code.INVALID_SCHEMA, "register", "b", body={"schema": '"R"', "references": [reference]})


@pytest.mark.parametrize("context", ["", ":.ctx:"])
@pytest.mark.parametrize("whole_subject", [True, False])
def test_an_id_is_not_used_again_after_the_records_of_its_schema_were_compacted(
    context: str, whole_subject: bool
) -> None:
    """Records with the id may still exist: they would be decoded with another schema."""
    registry = Registry()
    registry.register(f"{context}a", "int")
    assert registry.register(f"{context}b", "string") == 2
    registry.run("delete_subject", f"{context}b")
    if whole_subject:
        registry.run("delete_subject", f"{context}b", permanent=True)
    else:
        registry.run("delete_version", f"{context}b", version=1, permanent=True)
    latest = dict(registry.log)
    registry.state = State()
    for key, value in latest.items():
        if value is not None:
            registry.state.apply(key, value)
    assert registry.state.unreadable == 0
    assert registry.register(f"{context}c", "long") == 3


def test_imported_versions_that_refer_to_each_other_do_not_stop_the_registry() -> None:
    registry = Registry()
    registry.run("set_mode", body={"mode": "IMPORT"})

    def put(subject: str, schema_id: int, *referred: str) -> None:
        references = [{"name": f"{each}.json", "subject": each, "version": 1} for each in referred]
        fields = {each: {"$ref": f"{each}.json"} for each in referred}
        registry.register(
            subject, {"type": "object", "properties": fields}, "JSON", id=schema_id, version=1, references=references
        )

    put("b", 1)
    put("a", 2, "b")
    put("b", 3, "a")
    registry.run("set_mode", body={"mode": "READWRITE"})
    body = {"schemaType": "JSON", "schema": '{"$ref":"b.json"}'}
    references = [{"name": "b.json", "subject": "b", "version": 1}]
    assert registry.run("check", "c", body={**body, "references": references}) == {"is_compatible": True}


def test_a_chain_of_references_is_resolved_up_to_the_limit() -> None:
    registry = Registry()
    for number in range(REFERENCES_MAX + 2):
        fields, references = [], []
        if number:
            fields = [{"name": "f", "type": f"R{number - 1}"}]
            references = [{"name": f"R{number - 1}", "subject": f"s{number - 1}", "version": 1}]
        value = {"subject": f"s{number}", "version": 1, "id": number + 1, "references": references}
        schema = {"type": "record", "name": f"R{number}", "fields": fields}
        registry.state.apply(
            json.dumps({"keytype": "SCHEMA", "subject": f"s{number}", "version": 1, "magic": 1}).encode(),
            json.dumps({**value, "schema": json.dumps(schema), "deleted": False}).encode(),
        )

    def chained(number: int) -> dict[str, Any]:
        schema = json.dumps({"type": "record", "name": "Last", "fields": [{"name": "f", "type": f"R{number}"}]})
        return {"schema": schema, "references": [{"name": f"R{number}", "subject": f"s{number}", "version": 1}]}

    assert registry.run("check", "new", body=chained(REFERENCES_MAX - 1)) == {"is_compatible": True}
    registry.fails(Code.INVALID_SCHEMA, "check", "new", body=chained(REFERENCES_MAX))


OLD = {
    "type": "record",
    "name": "old-team.Order",
    "fields": [
        {"name": "line-no", "type": "int", "default": "zero"},
        {"name": "note", "type": ["null", "string"], "default": 7},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["in-work", "done"]}},
    ],
}
"""What older libraries accepted: names with dashes, and defaults of another type."""


def taken_over(*schemas: Any) -> Registry:
    """Return a registry with the log of another one, in which the subject `s` has these versions."""
    registry = Registry()
    for number, schema in enumerate(schemas, 1):
        key = {"keytype": "SCHEMA", "subject": "s", "version": number, "magic": 1}
        value = {"subject": "s", "version": number, "id": 40 + number, "schema": json.dumps(schema), "deleted": False}
        registry.state.apply(json.dumps(key).encode(), json.dumps(value).encode())
    return registry


def test_clients_of_a_registry_that_was_taken_over_find_their_old_schemas() -> None:
    by_rest = Registry()
    by_rest.run("set_mode", "s", body={"mode": "IMPORT"})
    assert by_rest.register("s", OLD, id=41) == 41
    by_rest.run("set_mode", "s", body={"mode": "READWRITE"})
    body = {"schema": json.dumps(OLD)}
    for registry in (taken_over(OLD), by_rest):
        assert registry.run("lookup", "s", body=body)["id"] == registry.run("register", "s", body=body)["id"] == 41
        assert registry.fails(Code.INVALID_SCHEMA, "register", "t", body=body).endswith("valid Avro name")
        assert registry.fails(Code.INVALID_SCHEMA, "check", "s", body=body).endswith("valid Avro name")


def test_new_versions_are_compared_with_old_ones_whose_names_and_defaults_are_invalid() -> None:
    fields = [{"name": "id", "type": "int", "default": "zero"}]
    registry = taken_over({"type": "record", "name": "R", "fields": fields})
    good = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
    bad = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "string"}]}
    assert registry.run("check", "s", body={"schema": json.dumps(good)}) == {"is_compatible": True}
    registry.fails(Code.INCOMPATIBLE, "register", "s", body={"schema": json.dumps(bad)})
    assert registry.register("s", good) == 42


def test_a_schema_that_is_registered_already_has_its_id_in_every_mode() -> None:
    """Producers that register at their start keep running while a registry is moved to another one."""
    registry = Registry()
    number = registry.register("s", "string")
    for mode in ("READONLY", "IMPORT"):
        registry.run("set_mode", "s", body={"mode": mode}, force=True)
        assert registry.register("s", "string") == number
        registry.fails(Code.NOT_PERMITTED, "register", "s", body={"schema": '"int"'})


def test_a_schema_with_all_types_in_it_is_that_of_a_version_with_references() -> None:
    """Generated classes of Java have one schema with all types, which the registry has as several."""
    registry = Registry()
    city = {"type": "record", "name": "City", "namespace": "geo", "fields": [{"name": "name", "type": "string"}]}
    registry.register("city", city)
    fields = [{"name": "home", "type": "geo.City"}, {"name": "work", "type": ["null", "geo.City"], "default": None}]
    person = {"type": "record", "name": "Person", "namespace": "shop", "fields": fields}
    reference = {"name": "geo.City", "subject": "city", "version": 1}
    number = registry.register("person", person, references=[reference])
    inlined = {**person, "fields": [{"name": "home", "type": city}, fields[1]]}
    assert registry.register("person", inlined) == number
    assert registry.run("lookup", "person", body={"schema": json.dumps(inlined)})["references"] == [reference]
    other = {**inlined, "fields": [{"name": "home", "type": {**city, "fields": []}}, fields[1]]}
    registry.fails(Code.SCHEMA_NOT_FOUND, "lookup", "person", body={"schema": json.dumps(other)})


def test_a_schema_is_found_although_another_registry_stored_its_attributes_in_another_order() -> None:
    stored = {"fields": [{"type": "int", "name": "id"}], "type": "record", "name": "R", "namespace": "n"}
    registry = taken_over(stored)
    body = {"schema": '{"type":"record","name":"R","namespace":"n","fields":[{"name":"id","type":"int"}]}'}
    assert registry.run("register", "s", body=body)["id"] == 41
    assert registry.run("lookup", "s", body=body)["version"] == 1
    assert [each.version for each in registry.state.versions("s")] == [1]
