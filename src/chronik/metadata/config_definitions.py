"""What a config is: its type, default, range and documentation, and how its text is parsed.

Configs are sent and stored as text, as in Kafka; only `ConfigDefinition.parse` parses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from chronik.wire.errors import ErrorCode, KafkaError

ConfigValue: TypeAlias = bool | int | float | str | tuple[str, ...]

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1


class ConfigType(IntEnum):
    """Kafka's codes for config types (DescribeConfigs v3)."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigSource(IntEnum):
    """Kafka's codes for config sources; of a topic or broker, a lower number takes precedence."""

    DYNAMIC_TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5
    DYNAMIC_BROKER_LOGGER = 6
    CLIENT_METRICS = 7
    DYNAMIC_GROUP = 8


@dataclass(frozen=True, slots=True)
class ConfigDefinition:
    """One config. `synonym` is the broker config that provides its default, if any."""

    name: str
    type: ConfigType
    default: str | None
    documentation: str
    lowest: float | None = None
    highest: float | None = None
    choices: tuple[str, ...] = ()
    items: str = ""
    """A regular expression that each item of a list matches."""
    synonym: str | None = None
    is_dynamic: bool = True

    def parse(self, text: str) -> ConfigValue:
        """Return the value of `text`, or raise INVALID_CONFIG with the reason."""
        text = text.strip()
        if self.type is ConfigType.STRING:
            return self._chosen(text)
        if self.type is ConfigType.LIST:
            return self._list(text)
        if self.type is ConfigType.BOOLEAN:
            if text.lower() not in {"true", "false"}:
                raise self._refused(text, "it must be true or false")
            return text.lower() == "true"
        return self._in_range(text)

    def _chosen(self, text: str) -> str:
        if self.choices and text not in self.choices:
            raise self._refused(text, f"it must be one of {', '.join(self.choices)}")
        return text

    def _list(self, text: str) -> tuple[str, ...]:
        items = split_list(text)
        for item in items:
            self._chosen(item)
            if self.items and not re.fullmatch(self.items, item, re.ASCII):
                raise self._refused(text, f"{item!r} does not match {self.items}")
        return items

    def _in_range(self, text: str) -> int | float:
        try:
            number = float(text) if self.type is ConfigType.DOUBLE else _integer(text)
        except ValueError:
            what = "number" if self.type is ConfigType.DOUBLE else "whole number"
            raise self._refused(text, f"it must be a {what}") from None
        # Written so that NaN is refused: both comparisons are false for it.
        if self.lowest is not None and not number >= self.lowest:
            raise self._refused(text, f"it must be at least {self.lowest}")
        if self.highest is not None and not number <= self.highest:
            raise self._refused(text, f"it must be at most {self.highest}")
        return number

    def _refused(self, text: str, reason: str) -> KafkaError:
        return KafkaError(ErrorCode.invalid_config, f"Invalid value {text!r} for configuration {self.name}: {reason}")


def split_list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def by_name(definitions: Iterable[ConfigDefinition]) -> Mapping[str, ConfigDefinition]:
    return {definition.name: definition for definition in definitions}


def _integer(text: str) -> int:
    # int() would also accept "1_000" and digits of other scripts.
    digits = text[1:] if text[:1] in {"-", "+"} else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 19:
        raise ValueError(text)
    return int(text)
