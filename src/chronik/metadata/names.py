"""Topic names: what Kafka allows, and which topics are the broker's own."""

import re

from chronik.wire.errors import ErrorCode, KafkaError

TOPIC_NAME_CHARS_MAX = 249

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
TRACES_TOPIC = "__chronik_traces"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")


def is_internal(name: str) -> bool:
    """Whether the broker owns the topic: clients may read and list it, not create or delete it."""
    return name in INTERNAL_TOPICS


def is_traceable(name: str) -> bool:
    """Traces of the topics that hold traces, or the cluster's state, would beget more of them."""
    return not name.startswith("__")


def check_topic_name(name: str) -> None:
    """Raises INVALID_TOPIC_EXCEPTION with the reason where the name may not be a topic's. It becomes a folder's."""
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
