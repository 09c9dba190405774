"""The registry's state, from the records of the topic `_schemas` in Confluent's format.

Key and value are JSON. Keys: {"keytype":"SCHEMA","subject":S,"version":V,"magic":1}, and with magic 0 CONFIG and MODE
(without a subject: global), DELETE_SUBJECT, CLEAR_SUBJECT, CONTEXT. A null value deletes, but has no effect for the
last three, as compaction may drop it. NOOP and unknown types have no meaning here. `lastId` of a CONTEXT is Chronik's
own: the context's last id, whose schema was deleted permanently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

Record = tuple[bytes, bytes | None]


class Reference(NamedTuple):
    name: str
    subject: str
    version: int


class Version(NamedTuple):
    """One version of a subject. `more` has metadata and rules, which this registry stores and does not interpret."""

    subject: str
    version: int
    id: int
    kind: str
    text: str
    references: tuple[Reference, ...] = ()
    is_deleted: bool = False
    more: str = ""

    @property
    def fingerprint(self) -> str:
        """Return what two versions with the same id share."""
        whole = json.dumps([self.kind, self.text, [[*each] for each in self.references], self.more])
        return hashlib.sha256(whole.encode()).hexdigest()


def context_of(subject: str) -> str:
    """Return the context of a subject, empty for the default one: `:.ctx:subject` has the context `:.ctx:`."""
    if not subject.startswith(":."):
        return ""
    end = subject.find(":", 2)
    context = subject if end < 0 else subject[: end + 1]
    return "" if context in (":.:", ":.") else context if context.endswith(":") else f"{context}:"


def normal_subject(subject: str) -> str:
    """Return a subject without the name of the default context, however often it is there."""
    while subject.startswith(":.:"):
        subject = subject.removeprefix(":.:")
    return subject


class State:
    """Owned by one loop. Invariant: an id belongs to one fingerprint of its context, and is never used for another."""

    def __init__(self) -> None:
        self.subjects: dict[str, dict[int, Version]] = {}
        self.ids: dict[tuple[str, int], Version] = {}
        """A version with this id, of any subject of the context, deleted ones included."""
        self.configs: dict[str, dict[str, Any]] = {}
        self.modes: dict[str, str] = {}
        self.last_ids: dict[str, int] = {}
        self.unreadable = 0
        self._fingerprints: dict[tuple[str, str], int] = {}
        self._holders: dict[tuple[str, int], dict[tuple[str, int], Version]] = {}
        """All versions with an id, by subject and number: a lookup by id does not depend on the number of subjects."""

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Read one record. Skip a record that has another format, and count it."""
        try:
            name = json.loads(key or b"")
            content = None if value is None else json.loads(value)
            self._apply(name, content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.unreadable += 1

    def _apply(self, key: dict[str, Any], value: dict[str, Any] | None) -> None:
        subject = normal_subject(key.get("subject") or "")
        if value is not None and not isinstance(value, dict):
            raise TypeError("the value is no object")
        match key["keytype"]:
            case "SCHEMA":
                self._apply_schema(subject, _int32(key["version"]), value)
            case "CONFIG":
                _put(self.configs, subject, value)
            case "MODE":
                _put(self.modes, subject, None if value is None else str(value["mode"]))
            case "DELETE_SUBJECT" if value is not None:
                for version in list(self.subjects.get(subject, {}).values()):
                    if version.version <= value["version"]:
                        self._put(version._replace(is_deleted=True))
            case "CONTEXT" if value is not None:
                context = context_of(f":{key['context']}:")
                self.last_ids[context] = max(self.last_ids.get(context, 0), int(value.get("lastId", 0)))
            case "CLEAR_SUBJECT" if value is not None:
                for version in self.subjects.pop(subject, {}).values():
                    self._release(version)

    def _apply_schema(self, subject: str, number: int, value: dict[str, Any] | None) -> None:
        if value is None:
            versions = self.subjects.get(subject, {})
            removed = versions.pop(number, None)
            if not versions:
                self.subjects.pop(subject, None)
            if removed is not None:
                self._release(removed)
                self._forget_id(removed)
            return
        references = tuple(
            Reference(str(each["name"]), str(each["subject"]), int(each["version"]))
            for each in value.get("references") or ()
        )
        more = {name: value[name] for name in ("metadata", "ruleSet") if value.get(name)}
        self._put(
            Version(
                subject,
                number,
                _int32(value["id"]),
                value.get("schemaType") or "AVRO",
                str(value["schema"]),
                references,
                bool(value.get("deleted")),
                json.dumps(more) if more else "",
            )
        )

    def _put(self, version: Version) -> None:
        context = context_of(version.subject)
        versions = self.subjects.setdefault(version.subject, {})
        if (replaced := versions.get(version.version)) is not None:
            self._release(replaced)
        versions[version.version] = version
        self._holders.setdefault((context, version.id), {})[version.subject, version.version] = version
        self.ids[context, version.id] = version
        self._fingerprints.setdefault((context, version.fingerprint), version.id)
        self.last_ids[context] = max(self.last_ids.get(context, 0), version.id)

    def _release(self, version: Version) -> None:
        """A version no longer has its id."""
        key = context_of(version.subject), version.id
        holders = self._holders.get(key, {})
        holders.pop((version.subject, version.version), None)
        if not holders:
            self._holders.pop(key, None)

    def _forget_id(self, removed: Version) -> None:
        """Release an id that no version has any more. `last_ids` keeps it: no other schema gets it."""
        context = context_of(removed.subject)
        others = self.with_id(removed.id, context, deleted=True)
        if others:
            self.ids[context, removed.id] = others[0]
        else:
            self.ids.pop((context, removed.id), None)
            self._fingerprints.pop((context, removed.fingerprint), None)

    # -- lookups -------------------------------------------------------------------------------------------------------

    def versions(self, subject: str, *, deleted: bool = False) -> list[Version]:
        """Return the versions of a subject, the oldest first."""
        found = sorted(self.subjects.get(subject, {}).values(), key=lambda each: each.version)
        return [each for each in found if deleted or not each.is_deleted]

    def version(self, subject: str, number: int, *, deleted: bool = False) -> Version | None:
        """Return a version; -1 is the latest one."""
        found = self.versions(subject, deleted=deleted)
        if number == -1:
            return found[-1] if found else None
        return next((each for each in found if each.version == number), None)

    def same_id(self, version: Version) -> int | None:
        """Return the id that this schema already has in its context."""
        return self._fingerprints.get((context_of(version.subject), version.fingerprint))

    def by_id(self, schema_id: int, subject: str = "") -> Version | None:
        """Return a version with this id. Without a context, search the default one, then those of any subject."""
        context = context_of(subject)
        found = self.ids.get((context, schema_id))
        if found is None and not context:
            found = next((each for (_, number), each in self.ids.items() if number == schema_id), None)
        return found

    def with_id(self, schema_id: int, context: str, *, deleted: bool = False) -> list[Version]:
        holders = self._holders.get((context, schema_id), {})
        return [version for _, version in sorted(holders.items()) if deleted or not version.is_deleted]

    def referrers(self, subject: str, number: int, *, deleted: bool = False) -> list[Version]:
        """Return the versions that refer to this one."""
        return [
            version
            for name in sorted(self.subjects)
            for version in self.versions(name, deleted=deleted)
            for reference in version.references
            if self.referred(version.subject, reference.subject) == subject and reference.version == number
        ]

    def referred_subjects(self, subject: str, given: Iterable[str] = ()) -> set[str]:
        """Return the subjects that `given` references and those of any version lead to, directly or through others."""
        found = {self.referred(subject, each) for each in given}
        waiting = [subject, *found]
        while waiting:
            parent = waiting.pop()
            for version in self.subjects.get(parent, {}).values():
                for reference in version.references:
                    name = self.referred(parent, reference.subject)
                    if name not in found:
                        found.add(name)
                        waiting.append(name)
        return found

    def referred(self, parent: str, subject: str) -> str:
        """Return the full name of a subject in a reference: without a context, it is in that of the parent."""
        return normal_subject(subject) if subject.startswith(":.") else context_of(parent) + subject

    def config(self, subject: str, name: str, default: Any) -> Any:
        """Return a setting: of the subject, else of its context, else the global one."""
        for scope in (subject, context_of(subject), ""):
            value = self.configs.get(scope, {}).get(name)
            if value is not None:
                return value
        return default

    def mode(self, subject: str) -> str:
        for scope in (subject, context_of(subject), ""):
            if scope in self.modes:
                return self.modes[scope]
        return "READWRITE"


def _int32(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 31:
        raise ValueError("an id or a version is out of range")
    return number


def _put(found: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        found.pop(name, None)
    else:
        found[name] = value


# -- records -----------------------------------------------------------------------------------------------------------


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def schema_record(version: Version) -> Record:
    value: dict[str, Any] = {"subject": version.subject, "version": version.version, "id": version.id}
    if version.kind != "AVRO":
        value["schemaType"] = version.kind
    if version.references:
        value["references"] = [each._asdict() for each in version.references]
    if version.more:
        value.update(json.loads(version.more))
    return _schema_key(version), _json({**value, "schema": version.text, "deleted": version.is_deleted})


def schema_tombstone(version: Version) -> Record:
    return _schema_key(version), None


def _schema_key(version: Version) -> bytes:
    return _json({"keytype": "SCHEMA", "subject": version.subject, "version": version.version, "magic": 1})


def deleted_subject_record(subject: str, last_version: int) -> Record:
    key = {"keytype": "DELETE_SUBJECT", "subject": subject, "magic": 0}
    return _json(key), _json({"subject": subject, "version": last_version})


def last_id_record(context: str, last_id: int) -> Record:
    name = {"tenant": "default", "context": context.strip(":") or "."}
    return _json({"keytype": "CONTEXT", **name, "magic": 0}), _json({**name, "lastId": last_id})


def setting_record(keytype: str, subject: str, value: dict[str, Any] | None) -> Record:
    """Return the record of CONFIG or MODE; without a subject, the global one."""
    given = {"subject": subject} if subject else {}
    key = {"keytype": keytype, **given, "magic": 0}
    return _json(key), None if value is None else _json({**given, **value})
