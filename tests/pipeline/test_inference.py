"""Schemas that are proposed from a sample of JSON values: every object of the sample fits them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import StartNode
from tests.support import topics
from tests.support.node import Node

from chronik.cli.errors import CliError
from chronik.cli.pipeline_infer import inferred_schema
from chronik.client.properties import ClientSettings
from chronik.pipeline.land.sample import sample_values
from chronik.pipeline.land.schema import RECORD_COLUMNS
from chronik.pipeline.typed.inference import Proposal, propose


def proposed(*values: Any) -> Proposal:
    return propose([json.dumps(value).encode() for value in values], sorted(RECORD_COLUMNS))


def columns(*values: Any) -> list[str]:
    return [line.rstrip(",") for line in proposed(*values).text.splitlines()]


def test_types_are_those_of_all_values_of_the_sample() -> None:
    found = columns(
        {"id": 1, "price": 1, "big": 2**63, "ok": True, "name": "ann"},
        {"at": "2026-01-31T12:00:00Z", "day": "2026-01-31"},
        {"id": -(2**63), "price": 1.5, "big": 1, "ok": None, "name": "", "at": "2026-01-31T12:00:00+02:00", "new": 1},
    )
    expected = "id BIGINT price DOUBLE big DOUBLE ok BOOLEAN name STRING at TIMESTAMP day DATE new BIGINT"
    assert " ".join(found) == expected
    assert columns({"at": "2026-01-31T12:00:00Z"}, {"at": "soon"}) == ["at STRING"]
    assert columns({"at": "2026-01-31"}, {"at": "2026-01-31T12:00:00Z"}) == ["at STRING"]
    assert columns({"at": "2026-02-31"}) == ["at STRING"]
    assert columns({"at": "9999-12-31T23:59:59-02:00"}) == ["at STRING"]


def test_nested_values_become_structs_arrays_and_maps() -> None:
    deep = {"where": {"x": 1, "Y": "a"}, "tags": ["a", None], "lines": [{"n": 1}, {"n": 2.5, "m": [True]}]}
    assert columns(deep) == [
        "where STRUCT<x: BIGINT, `Y`: STRING>",
        "tags ARRAY<STRING>",
        "lines ARRAY<STRUCT<n: DOUBLE, m: ARRAY<BOOLEAN>>>",
    ]
    found = proposed(*({"by_user": {f"u{number}": number}} for number in range(60)))
    assert found.text == "by_user MAP<STRING, BIGINT>\n"
    assert found.notes == ("by_user is a map: it had 60 different names",)


def test_what_no_column_can_hold_is_left_out_with_a_note() -> None:
    found = proposed(
        {"a": 1, "b": 1, "c": None, "Offset": 3, "e": [], "f": {}, "g h": 1, 'q"': 1, "": 1}, {"a": "x", "B": 2, "b": 2}
    )
    assert found.text == "b BIGINT\n"
    assert found.notes == (
        "a is left out: it was BIGINT and STRING",
        "c is left out: it was null in the whole sample",
        "Offset is left out: the table has a column of that name",
        "e[] is left out: it was null in the whole sample",
        "f is left out: it had no fields with a type",
        "g h is left out: a table cannot have a column of that name",
        'q" is left out: a table cannot have a column of that name',
        " is left out: a table cannot have a column of that name",
        "B is left out: the table has a column of that name",
    )


def test_values_that_are_no_objects_are_counted() -> None:
    found = propose([b"{}", b"[1]", b"{", b"\xff", None, b'{"a": 1}', b"\x00\x00\x00\x00\x01ab"], [])
    assert (found.objects, found.others, found.columns) == (2, 4, 1)
    assert propose([], []).columns == 0


NAMES = st.text(string.ascii_letters + "_-` é", min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "2026-01-31", "2026-01-31T12:00:00Z", "2026-01-31 12:00", "0001-01-01", "9999-12-31"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(st.dictionaries(NAMES, JSON, max_size=4), min_size=1, max_size=4))
def test_a_proposal_never_fails_and_names_each_field_once(values: list[dict[str, Any]]) -> None:
    found = proposed(*values)
    lines = [line for line in found.text.split(",\n") if line.strip()]
    assert (found.objects, found.columns) == (len(values), len(lines))


def test_a_sample_has_the_oldest_and_the_newest_values(start_node: StartNode) -> None:
    node: Node = start_node()
    topics.create(node.bootstrap, "sampled", 2)
    topics.append(node.bootstrap, "sampled", 0, topics.numbered(100))
    topics.append(node.bootstrap, "sampled", 1, topics.numbered(3, 1000))
    values = list(sample_values(node.bootstrap, "sampled", 40))
    oldest, newest = (topics.numbered(10, first) for first in (0, 90))
    expected = [record[1] for record in (*oldest, *newest, *topics.numbered(3, 1000))]
    assert values == expected


def test_an_inferred_schema_is_kept_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def infer(values: list[bytes], names: tuple[str, ...] = ("orders",), **more: Any) -> str:
        monkeypatch.setattr("chronik.pipeline.land.sample.sample_values", lambda *_: values)
        to = more.get("to", str(tmp_path / "tables"))
        return inferred_schema(ClientSettings("127.0.0.1:1"), names, to, more.get("given"))

    with pytest.raises(CliError, match="there are no values yet"):
        infer([])
    with pytest.raises(CliError, match="2 values are no JSON objects; omit --infer, or pass --format"):
        infer([b"x", b"\x00"])
    path = infer([b'{"id": 1}', b"x"])
    assert path == str(tmp_path / "tables" / "orders.schema.sql")
    assert Path(path).read_text() == "id BIGINT\n"
    assert "1 columns of orders from 1 values" in capsys.readouterr().err
    assert infer([b'{"other": 1}']) == path and Path(path).read_text() == "id BIGINT\n"
    assert "remove it to infer them again" in capsys.readouterr().err
    assert infer([b'{"id": 1}'], given=str(tmp_path / "own.sql"), to="s3://b/t") == str(tmp_path / "own.sql")
    with pytest.raises(CliError, match="one topic"):
        infer([], ("a", "b"))
    with pytest.raises(CliError, match="pass --schema FILE"):
        infer([], to="s3://b/t")
    assert [file.name for file in (tmp_path / "tables").iterdir()] == ["orders.schema.sql"]
