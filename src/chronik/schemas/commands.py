"""What requests do: a request and the state in, records to append and an answer out, or Refused.

Nothing here changes the state: the records do, once they are committed and read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from chronik.schemas.errors import (
    Code,
    InvalidSchema,
    Refused,
    schema_not_found,
    subject_not_found,
    version_not_found,
)
from chronik.schemas.parsing import LEVELS, TYPES, Parsed, incompatibilities, parse
from chronik.schemas.state import (
    Record,
    Reference,
    State,
    Version,
    context_of,
    deleted_subject_record,
    last_id_record,
    normal_subject,
    schema_record,
    schema_tombstone,
    setting_record,
)

DEFAULT_LEVEL = "BACKWARD"
MODES = ("READWRITE", "READONLY", "READONLY_OVERRIDE", "IMPORT", "FORWARD")
SUBJECT_CHARACTERS_MAX = 1_000
SCHEMA_BYTES_MAX = 900_000
"""Below the default of max.message.bytes: a schema is one record."""
REFERENCES_MAX = 1_000
COMPARED_MAX = 20
"""Versions, the latest ones, which a lookup parses to compare them."""
ID_MAX = (1 << 31) - 1
IMPORTED_ID_MAX = ID_MAX - 1_000_000
"""A higher id cannot be imported: new schemas get ids above all others, and must have some left."""

Visible = frozenset[str] | None
"""The subjects that references may name; None for all."""


class Outcome(NamedTuple):
    answer: Any
    records: tuple[Record, ...] = ()


class Command(NamedTuple):
    """A request that may change the state. `arguments` can be sent to another node as JSON.

    With `visible` in the arguments, references to subjects that are not in this list are missing: the client may not
    see them. The list is made before the command runs, so a subject that is referred to only later is missing, too.
    """

    name: str
    subject: str
    arguments: dict[str, Any]


def run(state: State, command: Command) -> Outcome:
    """Return the answer, and the records that must be committed before it is sent."""
    handle = _HANDLERS.get(command.name)
    if handle is None:
        raise Refused(Code.STORE, f"the command {command.name} is unknown: the nodes have different versions")
    subject = normal_subject(command.subject)
    if any(not each.isprintable() for each in subject) or len(subject) > SUBJECT_CHARACTERS_MAX:
        raise Refused(Code.INVALID_SUBJECT, f"The specified subject '{subject[:100]}' is not a valid subject.")
    try:
        return handle(state, subject, command.arguments)
    except UnicodeEncodeError:
        raise InvalidSchema("the request contains half of a surrogate pair, which is not text") from None


# -- schemas -----------------------------------------------------------------------------------------------------------


def register(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    if not subject:
        raise Refused(Code.INVALID_SUBJECT, "The specified subject '' is not a valid subject.")
    body = arguments["body"]
    given_id, given_version = _number(body, "id", -1), _number(body, "version", 0)
    new, parsed = _new_version(state, subject, arguments, _normalizes(state, subject, arguments))
    existing = _same_version(state, new, _visible(arguments))
    if existing is not None and given_version in (0, existing.version) and given_id in (-1, existing.id):
        return Outcome(_registered(existing))  # in every mode, so that clients can start while a registry is moved
    _check_register_mode(state, subject, given_id)
    if given_id < 0:
        parsed.check_new()
    all_versions = state.versions(subject, deleted=True)
    next_number = all_versions[-1].version + 1 if all_versions else 1
    is_import = state.mode(subject) in ("IMPORT", "FORWARD")
    if not is_import:
        problems = _problems(state, subject, parsed, state.versions(subject), _visible(arguments))
        if problems:
            level = state.config(subject, "compatibilityLevel", DEFAULT_LEVEL)
            text = ", ".join([*problems, f"{{compatibility: '{level}'}}"])
            raise Refused(
                Code.INCOMPATIBLE,
                "Schema being registered is incompatible with an earlier schema for subject "
                f'"{subject}", details: [{text}]',
            )
        if given_version > 0 and given_version != next_number:
            raise InvalidSchema("Version is not one more than previous version")
    number = given_version if given_version > 0 else next_number
    version = new._replace(version=number, id=_id_of(state, new, given_id))
    return Outcome(_registered(version), (schema_record(version),))


def _check_register_mode(state: State, subject: str, given_id: int) -> None:
    mode, context = state.mode(subject), context_of(subject)
    where = _place(subject, context)
    if mode.startswith("READONLY"):
        raise Refused(Code.NOT_PERMITTED, f"{where} is in read-only mode")
    if given_id >= 0 and mode not in ("IMPORT", "FORWARD"):
        raise Refused(Code.NOT_PERMITTED, f"{where} is not in import mode")
    if given_id < 0 and mode != "READWRITE":
        raise Refused(Code.NOT_PERMITTED, f"{where} is not in read-write mode")


def _place(subject: str, context: str) -> str:
    return f"Subject {subject}" + (f" in context {context.strip(':')}" if context else "")


def _id_of(state: State, version: Version, given_id: int) -> int:
    context = context_of(version.subject)
    if given_id > IMPORTED_ID_MAX:
        raise Refused(Code.NOT_PERMITTED, f"The id {given_id} is above {IMPORTED_ID_MAX}: no ids would be left")
    if given_id >= 0:
        other = state.ids.get((context, given_id))
        if other is not None and other.fingerprint != version.fingerprint:
            raise Refused(
                Code.NOT_PERMITTED, f"Overwrite new schema with id {given_id} is not permitted: it has another schema"
            )
        return given_id
    same = state.same_id(version)
    if same is not None:
        return same
    if state.last_ids.get(context, 0) >= ID_MAX:
        raise Refused(Code.STORE, f"all ids up to {ID_MAX} are in use")
    return state.last_ids.get(context, 0) + 1


def _registered(version: Version) -> dict[str, Any]:
    return {"id": version.id, **{name: value for name, value in version_view(version).items() if name != "subject"}}


def lookup(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    """Find a schema under a subject."""
    is_deleted = bool(arguments.get("deleted"))
    if not state.versions(subject, deleted=is_deleted):
        raise subject_not_found(subject)
    is_normal = _normalizes(state, subject, arguments)
    new, _ = _new_version(state, subject, arguments, is_normal)
    found = _same_version(state, new, _visible(arguments), deleted=is_deleted)
    if found is None and is_normal:
        found = _same_normal_version(state, new, _visible(arguments), deleted=is_deleted)
    if found is None:
        raise schema_not_found()
    if not arguments.get("format"):
        return Outcome(version_view(found))
    formatted = parsed_version(state, found, _visible(arguments)).formatted(arguments["format"])
    return Outcome(version_view(found) if formatted is None else {**version_view(found), "schema": formatted})


def check(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    """Test a schema against one version, or against those that the compatibility level names."""
    _, parsed = _new_version(state, subject, arguments, _normalizes(state, subject, arguments))
    parsed.check_new()
    number = arguments.get("version")
    if number is None:
        previous = state.versions(subject)
    else:
        version = state.version(subject, number)
        if version is None and number != -1:
            raise version_not_found(number)
        previous = [] if version is None else [version]
    problems = _problems(state, subject, parsed, previous, _visible(arguments))
    answer: dict[str, Any] = {"is_compatible": not problems}
    return Outcome({**answer, "messages": problems} if arguments.get("verbose") else answer)


def _problems(
    state: State, subject: str, parsed: Parsed, previous: list[Version], visible: Visible = None
) -> list[str]:
    level = state.config(subject, "compatibilityLevel", DEFAULT_LEVEL)
    if level == "NONE":
        return []
    compared = previous if level.endswith("_TRANSITIVE") else previous[-1:]
    return incompatibilities(level, parsed, [parsed_version(state, each, visible) for each in compared])


def parsed_version(state: State, version: Version, visible: Visible = None) -> Parsed:
    return parse(version.kind, version.text, resolve(state, version.subject, version.references, visible))


def _visible(arguments: dict[str, Any]) -> Visible:
    names = arguments.get("visible")
    return None if names is None else frozenset(names)


def _new_version(state: State, subject: str, arguments: dict[str, Any], normalizes: bool) -> tuple[Version, Parsed]:
    body, visible = arguments["body"], _visible(arguments)
    text, kind = body.get("schema"), body.get("schemaType") or "AVRO"
    if not isinstance(text, str) or not text.strip():
        raise InvalidSchema("Empty schema")
    if kind not in TYPES:
        raise InvalidSchema(f"Invalid schema type {str(kind)[:100]}: this registry has {', '.join(TYPES)}")
    if len(text.encode()) > SCHEMA_BYTES_MAX:
        raise Refused(Code.TOO_LARGE, f"the schema has more than {SCHEMA_BYTES_MAX:,} bytes")
    references = _references(state, subject, body.get("references") or [], visible)
    parsed = parse(kind, text, resolve(state, subject, references, visible))
    more = {name: body[name] for name in ("metadata", "ruleSet") if body.get(name)}
    canonical = parsed.normalized() if normalizes else parsed.canonical()
    return Version(subject, 0, -1, kind, canonical, references, more=json.dumps(more) if more else ""), parsed


def _references(state: State, subject: str, given: Any, visible: Visible) -> tuple[Reference, ...]:
    if not isinstance(given, list) or len(given) > REFERENCES_MAX:
        raise InvalidSchema(f"references must be a list of at most {REFERENCES_MAX}")
    found = []
    for each in given:
        try:
            reference = Reference(str(each["name"]), str(each["subject"]), _number(each, "version", -1))
        except (KeyError, TypeError, AttributeError):
            raise InvalidSchema("a reference needs name, subject and version") from None
        found.append(reference._replace(version=_target(state, subject, reference, visible).version))
    return tuple(found)


def _target(state: State, parent: str, reference: Reference, visible: Visible, *, deleted: bool = False) -> Version:
    """Return the version that a reference names. A hidden one has the same error as a missing one."""
    name = state.referred(parent, reference.subject)
    target = state.version(name, reference.version, deleted=deleted) if visible is None or name in visible else None
    if target is None:
        raise InvalidSchema(
            f"No schema reference found for subject '{reference.subject}' and version {reference.version}"
        )
    return target


def resolve(state: State, subject: str, references: tuple[Reference, ...], visible: Visible = None) -> dict[str, str]:
    """Return the texts of all references by name, the innermost first. A soft-deleted version still resolves."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    """Names that are found, or whose own references are being resolved: imported versions may refer to each other."""
    waiting = [("", "", subject, iter(references))]
    while waiting:
        name, text, parent, inner = waiting[-1]
        each = next(inner, None)
        if each is None:
            waiting.pop()
            if waiting:
                found[name] = text
        elif each.name not in seen:
            target = _target(state, parent, each, visible, deleted=True)
            if len(seen) >= REFERENCES_MAX:
                raise InvalidSchema(f"the schema has more than {REFERENCES_MAX} references")
            seen.add(each.name)
            waiting.append((each.name, target.text, target.subject, iter(target.references)))
    return found


def _same_version(state: State, new: Version, visible: Visible, *, deleted: bool = False) -> Version | None:
    fingerprint = new.fingerprint
    versions = state.versions(new.subject, deleted=deleted)
    for version in reversed(versions):
        # A registration without metadata or rules matches a version that has them.
        if fingerprint in (version.fingerprint, version._replace(more="").fingerprint if not new.more else ""):
            return version
    return _equivalent_version(state, new, versions, visible) if new.kind == "AVRO" else None


def _equivalent_version(state: State, new: Version, versions: list[Version], visible: Visible) -> Version | None:
    """Return a version of Avro with the same canonical text, whatever text is stored.

    Other registries store attributes in another order. And generated classes have one schema with all types, which the
    registry may have as several that refer to each other.
    """
    for version in reversed(versions[-COMPARED_MAX:]):
        if version.kind == new.kind and new.more in ("", version.more):
            with suppress(InvalidSchema):  # it has a reference that the client may not see
                parsed: Any = parsed_version(state, version, visible)
                same = parsed.canonical() if new.references == version.references else None
                if new.text == (same if new.references or not version.references else parsed.inlined()):
                    return version
    return None


def _same_normal_version(state: State, new: Version, visible: Visible, *, deleted: bool) -> Version | None:
    """Return a version that was registered without normalization, and has this normal form."""
    for version in reversed(state.versions(new.subject, deleted=deleted)[-COMPARED_MAX:]):
        if version.kind == new.kind and parsed_version(state, version, visible).normalized() == new.text:
            return version
    return None


def _normalizes(state: State, subject: str, arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("normalize")) or state.config(subject, "normalize", False) is True


def _number(body: dict[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= ID_MAX:
        raise InvalidSchema(f"{name} must be a whole number")
    return value


# -- deletion ----------------------------------------------------------------------------------------------------------


def delete_version(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    number, is_permanent = arguments["version"], bool(arguments.get("permanent"))
    if not state.versions(subject, deleted=True):
        raise subject_not_found(subject)
    _check_writable(state, subject)
    version = state.version(subject, number, deleted=is_permanent or number != -1)
    if version is None:
        raise version_not_found(number)
    if version.is_deleted and not is_permanent:
        raise Refused(
            Code.VERSION_SOFT_DELETED,
            f"Subject '{subject}' Version {version.version} was soft deleted.Set permanent=true to delete permanently",
        )
    if is_permanent and not version.is_deleted:
        raise Refused(
            Code.VERSION_NOT_SOFT_DELETED,
            f"Subject '{subject}' Version {version.version} was not deleted first before being permanently deleted",
        )
    _check_unreferenced(state, [version], is_permanent)
    if not is_permanent:
        return Outcome(version.version, (schema_record(version._replace(is_deleted=True)),))
    is_last = len(state.versions(subject, deleted=True)) == 1
    settings = _without_settings(state, subject) if is_last else ()
    return Outcome(version.version, (schema_tombstone(version), *settings, *_kept_id(state, [version])))


def delete_subject(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    is_permanent = bool(arguments.get("permanent"))
    versions = state.versions(subject, deleted=True)
    if not versions:
        raise subject_not_found(subject)
    _check_writable(state, subject)
    live = [each for each in versions if not each.is_deleted]
    if is_permanent:
        if live:
            raise Refused(
                Code.SUBJECT_NOT_SOFT_DELETED,
                f"Subject '{subject}' was not deleted first before being permanently deleted",
            )
        _check_unreferenced(state, versions, is_permanent)
        records = [schema_tombstone(each) for each in reversed(versions)]
        settings = _without_settings(state, subject)
        return Outcome([each.version for each in versions], (*records, *settings, *_kept_id(state, versions)))
    if not live:
        raise Refused(
            Code.SUBJECT_SOFT_DELETED, f"Subject '{subject}' was soft deleted.Set permanent=true to delete permanently"
        )
    _check_unreferenced(state, live, is_permanent)
    record = deleted_subject_record(subject, live[-1].version)
    return Outcome([each.version for each in live], (record,))


def _check_writable(state: State, subject: str) -> None:
    if state.mode(subject).startswith("READONLY"):
        raise Refused(Code.NOT_PERMITTED, f"{_place(subject, context_of(subject))} is in read-only mode")


def _check_unreferenced(state: State, versions: list[Version], is_permanent: bool) -> None:
    for version in versions:
        others = state.referrers(version.subject, version.version, deleted=is_permanent)
        if any(each not in versions for each in others):
            raise Refused(
                Code.REFERENCE_EXISTS,
                f"One or more references exist to the schema {{magic=1,keytype=SCHEMA,subject={version.subject},"
                f"version={version.version}}}.",
            )


def _kept_id(state: State, removed: list[Version]) -> tuple[Record, ...]:
    """Return the record of the context's last id if a removed version has it: compaction removes the others."""
    context = context_of(removed[0].subject)
    last_id = state.last_ids[context]
    return (last_id_record(context, last_id),) if any(each.id == last_id for each in removed) else ()


def _without_settings(state: State, subject: str) -> tuple[Record, ...]:
    return (
        *([setting_record("MODE", subject, None)] if subject in state.modes else ()),
        *([setting_record("CONFIG", subject, None)] if subject in state.configs else ()),
    )


# -- settings ----------------------------------------------------------------------------------------------------------


def set_config(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    body = dict(arguments["body"])
    level = body.pop("compatibility", body.pop("compatibilityLevel", None))
    if (level is None and not body) or (level is not None and str(level).upper() not in LEVELS):
        *others, last = [each.lower() for each in LEVELS]
        message = f"Invalid compatibility level. Valid values are {', '.join(others)}, and {last}"
        raise Refused(Code.INVALID_COMPATIBILITY, message)
    _check_writable(state, subject)
    value = {**state.configs.get(subject, {}), **body}
    value.pop("subject", None)
    if level is not None:
        value["compatibilityLevel"] = str(level).upper()
    answer = {**body, **({} if level is None else {"compatibility": str(level).upper()})}
    return Outcome(answer, (setting_record("CONFIG", subject, value),))


def delete_config(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    if subject and subject not in state.configs:
        raise subject_not_found(subject)
    level = state.configs.get(subject, {}).get("compatibilityLevel", DEFAULT_LEVEL)
    return Outcome({"compatibilityLevel": level}, (setting_record("CONFIG", subject, None),))


def set_mode(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    mode = str(arguments["body"].get("mode", "")).upper()
    if mode not in MODES:
        raise Refused(Code.INVALID_MODE, f"Invalid mode. Valid values are {', '.join(MODES)}")
    if mode == "IMPORT" and not arguments.get("force") and state.mode(subject) != "IMPORT":
        scope = subject or ""
        holds = any(not scope or name == scope or context_of(name) == scope for name in state.subjects)
        if holds:
            raise Refused(Code.NOT_PERMITTED, "Cannot import since found existing subjects")
    return Outcome({"mode": mode}, (setting_record("MODE", subject, {"mode": mode}),))


def delete_mode(state: State, subject: str, arguments: dict[str, Any]) -> Outcome:
    if subject and subject not in state.modes:
        raise subject_not_found(subject)
    return Outcome({"mode": state.modes.get(subject, "READWRITE")}, (setting_record("MODE", subject, None),))


def version_view(version: Version) -> dict[str, Any]:
    """Return a version as the REST API shows it."""
    view: dict[str, Any] = {"subject": version.subject, "version": version.version, "id": version.id}
    if version.kind != "AVRO":
        view["schemaType"] = version.kind
    if version.references:
        view["references"] = [each._asdict() for each in version.references]
    if version.more:
        view.update(json.loads(version.more))
    view["schema"] = version.text
    return view


_HANDLERS: dict[str, Callable[[State, str, dict[str, Any]], Outcome]] = {
    handler.__name__: handler
    for handler in (
        register,
        lookup,
        check,
        delete_version,
        delete_subject,
        set_config,
        delete_config,
        set_mode,
        delete_mode,
    )
}
