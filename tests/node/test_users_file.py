"""The users file: its format, its permissions, and its reload."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.conftest import StartNode
from tests.node.support_sasl import log_in, write_users
from tests.node.support_wire import connect
from tests.support.eventually import eventually
from tests.support.node import Node, NodeFailed

from chronik.node.config import ConfigError
from chronik.node.serving.users_file import FILE_BYTES_MAX, USERS_MAX, parse_users, read_users
from chronik.storage.disk import RealDisk
from chronik.wire.errors import ErrorCode

RELOADED_S = 15.0


def settings(path: Path) -> dict[str, object]:
    return {
        "security": {"protocol": "SASL_PLAINTEXT"},
        "sasl": {"users_file": str(path), "mechanisms": ["PLAIN", "SCRAM-SHA-512"], "failure_delay_ms": 0},
    }


def outcome(node: Node, user: str, password: str) -> ErrorCode:
    with connect(node) as client:
        code: ErrorCode = log_in(client, "PLAIN", user, password).error_code
        return code


def test_line_is_a_name_and_a_password_with_any_characters() -> None:
    text = "# comment\n\n  # another\nalice:a:b#c \nbob : secret\n"
    assert parse_users(text, "users") == {"alice": "a:b#c ", "bob": " secret"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("alice", "line 1 is not NAME:PASSWORD"),
        ("a:b\n:hunter2", "line 2 is not NAME:PASSWORD"),
        ("alice:", "line 1 is not NAME:PASSWORD"),
        ("alice:hunter2\0", "line 1 is not NAME:PASSWORD"),
        ("alice:hunter2\nalice:hunter3", "line 2 repeats a user"),
        ("".join(f"user-{n}:hunter2\n" for n in range(USERS_MAX + 1)), "at most 1000"),
    ],
)
def test_malformed_file_is_refused_without_showing_it(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error) as refused:
        parse_users(text, "users")
    assert "hunter" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o606])
def test_file_that_others_may_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = write_users(tmp_path / "users", mode=mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_users(RealDisk(), path)


def test_missing_or_large_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_users(RealDisk(), str(tmp_path / "users"))
    path = tmp_path / "users"
    path.touch(0o600)
    os.truncate(path, FILE_BYTES_MAX + 1)
    with pytest.raises(ConfigError, match="is larger than"):
        read_users(RealDisk(), str(path))


def test_node_refuses_to_start_with_a_file_that_others_may_read(start_node: StartNode, tmp_path: Path) -> None:
    path = write_users(tmp_path / "users", mode=0o644)
    with pytest.raises(NodeFailed, match=f"chronik: other users may read the users file {path}: chmod 600 {path}"):
        start_node(**settings(Path(path)))


def test_changed_file_is_loaded_and_a_bad_one_is_not(start_node: StartNode, tmp_path: Path) -> None:
    path = tmp_path / "users"
    write_users(path, {"alice": "first"})
    node = start_node(**settings(path))
    assert outcome(node, "alice", "first") is ErrorCode.none
    write_users(path, {"alice": "second", "bob": "new"})
    eventually(lambda: outcome(node, "bob", "new") is ErrorCode.none, RELOADED_S)
    assert outcome(node, "alice", "second") is ErrorCode.none
    assert outcome(node, "alice", "first") is ErrorCode.sasl_authentication_failed
    # The node keeps the users that it has.
    write_users(path, {"mallory": "readable"}, mode=0o644)
    eventually(lambda: "users_file_refused" in node.log_text(), RELOADED_S)
    assert outcome(node, "alice", "second") is ErrorCode.none
    assert outcome(node, "mallory", "readable") is ErrorCode.sasl_authentication_failed
    assert not any(secret in node.log_text() for secret in ("first", "second", "readable"))
