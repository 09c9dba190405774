"""Parsing the text of options."""

import pytest

from chronik.cli import app
from chronik.cli.errors import CliError
from chronik.cli.options import parse_acks, parse_configs, parse_time_ms
from chronik.client.endpoint import parse_bootstrap


def test_bootstrap_is_a_list_of_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_bootstrap("a:1, [::1]:2") == [("a", 1), ("::1", 2)]
    for wrong in ("", "a", "a:1;b:2"):
        assert app.main(["topic", "list", "-b", wrong]) == 2
        assert capsys.readouterr().err.startswith("chronik: --bootstrap: ")


def test_configs_are_key_value_pairs() -> None:
    assert parse_configs("--config", ["a=1", "b=x=y", "c="], "a=1") == {"a": "1", "b": "x=y", "c": ""}
    with pytest.raises(CliError, match="NAME=VALUE"):
        parse_configs("--config", ["a"], "a=1")


def test_acks_are_all_1_or_0() -> None:
    assert [parse_acks(text) for text in ("all", "-1", "1", "0")] == ["all", "all", "1", "0"]
    with pytest.raises(CliError):
        parse_acks("2")


def test_a_time_is_iso_8601_or_epoch_milliseconds() -> None:
    assert parse_time_ms("2024-01-01T00:00:00Z") == 1_704_067_200_000
    assert parse_time_ms("1704067200000") == 1_704_067_200_000
    assert parse_time_ms("42") is None
    assert parse_time_ms("soon") is None
