"""Topic names: which ones Kafka allows, and which topics are internal."""

import re

from chronik.wire.errors import ErrorCode, KafkaError

TOPIC_NAME_CHARS_MAX = 249

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
TRACES_TOPIC = "__chronik_traces"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")


def is_internal(name: str) -> bool:
    """Whether the topic is internal: clients may read and list it, but not create or delete it."""
    return name in INTERNAL_TOPICS


def is_traceable(name: str) -> bool:
    """Whether the topic may be traced. Tracing a topic that holds traces or cluster state would create more traces."""
    return not name.startswith("__")


def check_topic_name(name: str) -> None:
    """Raise INVALID_TOPIC_EXCEPTION with the reason if the topic name is illegal. It becomes a folder name."""
    if not name:
        reason = "the empty string is not allowed"
    elif name in {".", ".."}:
        reason = "'.' and '..' are not allowed"
    elif len(name) > TOPIC_NAME_CHARS_MAX:
        reason = f"it is {len(name)} characters long, at most {TOPIC_NAME_CHARS_MAX} are allowed"
    elif not _LEGAL.fullmatch(name):
        reason = "only ASCII letters, digits, '.', '_' and '-' are allowed"
    else:
        return
    shown = name if len(name) <= TOPIC_NAME_CHARS_MAX else name[:32] + "..."
    raise KafkaError(ErrorCode.invalid_topic_exception, f"topic name {shown!r} is invalid: {reason}")
