"""Log lines, levels and components."""

import json
import logging
from typing import Any

import pytest

from chronik.observe.logging import LibraryLog, Logger, LogLevelError, LogLevels, PrintedLog, make_logger, parse_levels


def logger_into(lines: list[str], **levels: str) -> Logger:
    return make_logger(lines.append, lambda: 1_700_000_000_123, LogLevels.from_names(levels), node=7)


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_a_log_line_is_json_with_the_time_of_the_given_clock() -> None:
    lines: list[str] = []
    logger_into(lines).info("ready", port=9092)
    assert lines[0].endswith("\n")
    assert parsed(lines) == [
        {
            "time": "2023-11-14T22:13:20.123+00:00",
            "level": "info",
            "event": "ready",
            "component": "node",
            "node": 7,
            "port": 9092,
        }
    ]


def test_each_component_has_its_own_level() -> None:
    lines: list[str] = []
    root = logger_into(lines, default="warning", groups="debug")
    root.info("quiet")
    root.bind(component="storage").info("quiet")
    root.bind(component="groups").debug("heard")
    root.bind(component="groups", group="g").bind(member="m").debug("heard")
    assert [(line["event"], line["component"]) for line in parsed(lines)] == [("heard", "groups")] * 2
    assert parsed(lines)[1]["group"] == "g"


def test_changed_levels_apply_to_loggers_that_exist_already() -> None:
    lines: list[str] = []
    root = logger_into(lines, groups="error")
    groups, storage = root.bind(component="groups"), root.bind(component="storage")
    root.levels = root.levels.changed({"groups": None, "storage": 10}, default=30)
    groups.info("quiet")
    groups.warning("heard")
    storage.debug("heard")
    assert [(line["event"], line["component"]) for line in parsed(lines)] == [("heard", "groups"), ("heard", "storage")]


def test_an_exception_is_logged_in_one_line() -> None:
    lines: list[str] = []
    try:
        raise ValueError("no\nsuch thing")
    except ValueError:
        logger_into(lines).exception("request_failed", api="Fetch")
    [line] = parsed(lines)
    assert lines[0].count("\n") == 1
    assert line["level"] == "error"
    assert "ValueError" in line["traceback"]


def test_values_without_a_json_type_are_written_as_text() -> None:
    lines: list[str] = []
    logger_into(lines).info("odd", value={1, 2}.__class__, data=b"x")
    assert parsed(lines)[0]["data"] == "b'x'"


def test_levels_are_parsed_from_names_with_optional_components() -> None:
    assert parse_levels(["warn", "groups=debug"]) == {"default": "warn", "groups": "debug"}
    assert LogLevels.from_names({"default": "warn"}).level_of("anything") == 30


@pytest.mark.parametrize("text", ["loud", "groups=loud", "=debug"])
def test_an_invalid_level_is_refused(text: str) -> None:
    with pytest.raises(LogLevelError):
        parse_levels([text])


def test_a_library_message_is_one_line_even_if_its_format_is_wrong() -> None:
    lines: list[str] = []
    library = logging.Logger("library")
    library.addHandler(LibraryLog(logger_into(lines)))
    library.info("not heard")
    library.warning("%d too few", "x")
    try:
        raise ValueError("no")
    except ValueError:
        library.exception("it %s", "failed")
    wrong, failed = parsed(lines)
    assert (wrong["event"], wrong["level"], wrong["detail"]) == ("library_message", "warning", "%d too few")
    assert (failed["level"], failed["detail"], failed["error"]) == ("error", "it failed", "ValueError('no')")


def test_what_a_library_prints_becomes_json_lines() -> None:
    lines: list[str] = []
    stream = PrintedLog(logger_into(lines))
    print("-" * 4, file=stream)
    print("Exception", "of a thread\n", file=stream)
    print("no end", end="", file=stream)
    assert [line["detail"] for line in parsed(lines)] == ["----", "Exception of a thread"]
    print("x" * 10_000, end="", file=stream)
    assert len(parsed(lines)[2]["detail"]) == 8192 and parsed(lines)[2]["library"] == "stderr"
