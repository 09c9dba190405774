"""`chronik schema` against the registry of a real node."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.run_chronik import Outcome, chronik
from tests.conftest import StartNode


def avro(*fields: dict[str, object]) -> str:
    return json.dumps({"type": "record", "name": "Order", "fields": list(fields)})


def test_schemas_are_registered_checked_shown_and_deleted(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node()

    def schema(*arguments: str) -> Outcome:
        return chronik("schema", *arguments, "-b", node.bootstrap)

    first, second, bad = tmp_path / "first.avsc", tmp_path / "second.avsc", tmp_path / "bad.avsc"
    number: dict[str, object] = {"name": "id", "type": "long"}
    first.write_text(avro(number))
    second.write_text(avro(number, {"name": "note", "type": "string", "default": ""}))
    bad.write_text(avro({"name": "id", "type": "string"}))
    assert schema("list", "--json").json() == {"subjects": []}
    registered = schema("register", "orders-value", str(first))
    assert registered.code == 0 and "with the id 1" in registered.out, registered
    assert schema("check", "orders-value", str(second)).out.endswith("is compatible with orders-value\n")
    refused = schema("check", "orders-value", str(bad))
    assert refused.code == 1 and "is not compatible with orders-value" in refused.err, refused
    assert "TYPE_MISMATCH" in refused.err
    refused = schema("register", "orders-value", str(bad))
    assert refused.code == 2 and "is incompatible with an earlier schema" in refused.err, refused
    assert schema("register", "orders-value", str(second), "--json").json()["id"] == 2
    assert schema("list", "--json").json()["subjects"] == [
        {"subject": "orders-value", "version": 2, "id": 2, "type": "AVRO"}
    ]
    shown = schema("show", "orders-value", "--json").json()
    assert (shown["version"], shown["versions"], shown["compatibility"]) == (2, [1, 2], "BACKWARD")
    assert '"name": "note"' in schema("show", "orders-value").out
    assert schema("show", "--id", "1", "--json").json()["subjects"] == [{"subject": "orders-value", "version": 1}]
    assert "compatibility of orders-value: NONE" in schema("config", "orders-value", "--set", "none").out
    assert schema("register", "orders-value", str(bad)).code == 0
    assert schema("delete", "orders-value", "--version", "3", "--json").json() == {"deleted": [3]}
    assert "deleted version 1, 2 of orders-value" in schema("delete", "orders-value").out
    assert schema("list", "--json").json() == {"subjects": []}
    assert schema("delete", "orders-value", "--permanent").code == 0


def test_wrong_use_is_one_line_that_names_the_way_out(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node()
    odd, text = tmp_path / "schema.txt", tmp_path / "schema.avsc"
    odd.write_text('"int"')
    text.write_text('{"type": "nothing"}')
    for arguments, said in (
        (("show", "orders-value"), "Subject 'orders-value' not found"),
        (("show",), "name a subject, or an id"),
        (("register", "s", str(odd)), "pass --type AVRO|JSON|PROTOBUF"),
        (("register", "s", str(tmp_path / "none.avsc")), "cannot read"),
        (("register", "s", str(text)), "nothing"),
        (("register", "s", str(text), "--reference", "x"), "is not NAME=SUBJECT:VERSION"),
        (("config", "--set", "SOME"), "Invalid compatibility level"),
    ):
        outcome = chronik("schema", *arguments, "-b", node.bootstrap)
        assert outcome.code == 2 and said in outcome.err and outcome.err.count("\n") == 1, (arguments, outcome)
