"""Between the declarations of a Protobuf file and its descriptor, which Google's library checks: names, numbers, types.

Custom options are part of the text, and not of a descriptor that is made of a text: no reader of records uses them.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from chronik.schemas.errors import InvalidSchema
from chronik.schemas.proto_file import (
    FIELD_NUMBER_MAX,
    SCALARS,
    Enum,
    EnumValue,
    Extend,
    Extensions,
    Field,
    Message,
    Method,
    OneOf,
    Option,
    ProtoFile,
    Reserved,
    Service,
    Value,
    Word,
)
from chronik.schemas.proto_parser import parse_file

GOOGLE = {
    "protobuf": "any api descriptor duration empty field_mask source_context struct timestamp type wrappers",
    "type": "calendar_period color date datetime dayofweek decimal expr fraction interval latlng localized_text money "
    "month phone_number postal_address quaternion timeofday",
}
"""Google's own files, by folder: serializers import them without a reference."""
_META_FIELDS = "string doc = 1; map<string, string> params = 2; repeated string tags = 3;"
CONFLUENT = {
    "confluent/meta.proto": f"""
        syntax = "proto3"; package confluent; import "google/protobuf/descriptor.proto";
        message Meta {{ {_META_FIELDS} }}
        extend google.protobuf.FileOptions {{ Meta file_meta = 1088; }}
        extend google.protobuf.MessageOptions {{ Meta message_meta = 1088; }}
        extend google.protobuf.FieldOptions {{ Meta field_meta = 1088; }}
        extend google.protobuf.EnumOptions {{ Meta enum_meta = 1088; }}
        extend google.protobuf.EnumValueOptions {{ Meta enum_value_meta = 1088; }}""",
    "confluent/type/decimal.proto": """
        syntax = "proto3"; package confluent.type;
        message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }""",
    "confluent/types/decimal.proto": 'syntax = "proto3"; import public "confluent/type/decimal.proto";',
    "confluent/type/variant.proto": """
        syntax = "proto3"; package confluent.type;
        message Variant { bytes metadata = 1; bytes value = 2; }""",
}
"""Files that Confluent's serializers import without a reference."""

DECLARATIONS_MAX = 10_000

_Proto: Any = descriptor_pb2
_FIELD: Any = descriptor_pb2.FieldDescriptorProto
_KINDS = {name: getattr(_FIELD, f"TYPE_{name.upper()}") for name in SCALARS}
_KIND_NAMES = {number: name for name, number in _KINDS.items()}
_LABELS = {"": 1, "optional": 1, "required": 2, "repeated": 3}
_WIRE_RESERVED = range(19_000, 20_000)


def _is_text(proto: Any) -> bool:
    """Return whether all strings of a message are text: the library leaves those that are not UTF-8 as bytes."""
    for field, value in proto.ListFields():
        values = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (value,)
        if field.type == _FIELD.TYPE_STRING and any(isinstance(each, bytes) for each in values):
            return False
        if field.type == _FIELD.TYPE_MESSAGE and not all(map(_is_text, values)):
            return False
    return True


class Files:
    """A file and what it imports, checked together. `descriptors` are the serialized descriptors by name."""

    def __init__(self) -> None:
        self._pool: Any = descriptor_pool.DescriptorPool()
        self.declared: dict[str, ProtoFile] = {}
        self.descriptors: dict[str, bytes] = {}

    def add(self, name: str, file: ProtoFile) -> None:
        """Raises InvalidSchema."""
        self._import(file)
        self._build(name, _descriptor(name, file))
        self.declared[name] = file

    def add_serialized(self, name: str, data: bytes) -> ProtoFile:
        """Add a file by its descriptor, and return its declarations. Raises InvalidSchema."""
        proto = _Proto.FileDescriptorProto()
        try:
            proto.ParseFromString(data)
        except DecodeError:
            raise InvalidSchema("the Protobuf schema is neither a text nor a serialized descriptor") from None
        if not _is_text(proto):
            raise InvalidSchema("the Protobuf schema has a name that is not UTF-8")
        for imported in proto.dependency:
            self._import_builtin(imported)
        proto.name = name
        self._build(name, proto)
        self.declared[name] = _Reader(self._pool).file(proto)
        return self.declared[name]

    def _import(self, file: ProtoFile) -> None:
        for imported in (*file.imports, *file.public_imports):
            self._import_builtin(imported)
            if imported not in self.declared:
                raise InvalidSchema(f'the Protobuf schema imports "{imported}": add a reference with this name')

    def _import_builtin(self, name: str) -> None:
        if name in self.declared:
            return
        if name in CONFLUENT:
            self.add(name, parse_file(CONFLUENT[name]))
        elif name.startswith("google/"):
            folder, _, file = name.removeprefix("google/").removesuffix(".proto").partition("/")
            if file in GOOGLE.get(folder, "").split():
                module = importlib.import_module(f"google.{folder}.{file}_pb2")
                self.add_serialized(name, module.DESCRIPTOR.serialized_pb)

    def _build(self, name: str, proto: Any) -> None:
        if _declarations(proto.message_type, proto.enum_type) > DECLARATIONS_MAX:
            raise InvalidSchema(f"the Protobuf schema has more than {DECLARATIONS_MAX} fields, types and values")
        try:
            built = self._pool.AddSerializedFile(proto.SerializeToString())
        except (TypeError, ValueError) as error:
            reason = str(error).removeprefix("Couldn't build proto file into descriptor pool: ")
            raise InvalidSchema(f"the Protobuf schema is invalid: {reason[:500]}") from None
        resolved = _Proto.FileDescriptorProto()
        built.CopyToProto(resolved)
        self.descriptors[name] = resolved.SerializeToString()


def _declarations(messages: Any, enums: Any) -> int:
    """Count what Google's library checks in one call, during which no other Python code runs."""
    count = sum(1 + len(each.value) + len(each.reserved_range) for each in enums)
    left = list(messages)
    while left:
        message = left.pop()
        count += 1 + len(message.field) + len(message.oneof_decl) + len(message.extension)
        count += len(message.reserved_range) + len(message.reserved_name) + len(message.extension_range)
        count += sum(1 + len(each.value) + len(each.reserved_range) for each in message.enum_type)
        left += message.nested_type
    return count


# -- from declarations to a descriptor ---------------------------------------------------------------------------------


def _descriptor(name: str, file: ProtoFile) -> Any:
    proto = _Proto.FileDescriptorProto(name=name)
    if file.package:
        proto.package = file.package
    if file.is_edition:
        proto.syntax = "editions"
        try:
            proto.edition = _Proto.Edition.Value(f"EDITION_{file.syntax}")
        except ValueError:
            raise InvalidSchema(f"the edition {file.syntax} of Protobuf is unknown") from None
    elif file.syntax == "proto3":
        proto.syntax = "proto3"
    proto.dependency.extend(dict.fromkeys([*file.imports, *file.public_imports]))
    proto.public_dependency.extend(list(proto.dependency).index(each) for each in dict.fromkeys(file.public_imports))
    _set_options(proto.options, file.options)
    for message in file.messages:
        _message(proto.message_type.add(), message, file.syntax)
    for enum in file.enums:
        _enum(proto.enum_type.add(), enum, file.syntax)
    _extends(proto, proto.message_type, file.extends, file.syntax)
    for service in file.services:
        _service(proto.service.add(), service)
    return proto


def _message(proto: Any, message: Message, syntax: str) -> None:
    proto.name = message.name
    _set_options(proto.options, message.options)
    for nested in message.messages:
        _message(proto.nested_type.add(), nested, syntax)
    for enum in message.enums:
        _enum(proto.enum_type.add(), enum, syntax)
    for oneof in message.oneofs:
        if not oneof.fields:
            raise InvalidSchema(f"the oneof {oneof.name} has no fields")
        _set_options(proto.oneof_decl.add(name=oneof.name).options, oneof.options)
    for field in message.fields:
        _field(proto.field.add(), field, syntax, proto.nested_type)
    for number, oneof in enumerate(message.oneofs):
        for field in oneof.fields:
            _field(proto.field.add(oneof_index=number), field, syntax, proto.nested_type)
    for field in proto.field:
        if field.proto3_optional:
            # Each optional field of proto3 is alone in a oneof of its own.
            field.oneof_index = len(proto.oneof_decl)
            proto.oneof_decl.add(name=f"_{field.name}")
    for part in (part for each in message.reserved for part in each.parts):
        if isinstance(part, str):
            proto.reserved_name.append(part)
        else:
            proto.reserved_range.add(start=part[0], end=part[1] + 1)
    for extensions in message.extensions:
        for first, last in extensions.ranges:
            _set_options(proto.extension_range.add(start=first, end=last + 1).options, extensions.options)
    _extends(proto, proto.nested_type, message.extends, syntax)
    _check_numbers(proto)


def _check_numbers(proto: Any) -> None:
    """Check what Google's library leaves to the compiler."""
    ranges = sorted((each.start, each.end) for each in proto.reserved_range)
    ends = list(accumulate((end for _, end in ranges), max))
    names = set(proto.reserved_name)
    for field in proto.field:
        before = bisect_right(ranges, (field.number, FIELD_NUMBER_MAX + 2))
        if field.number in _WIRE_RESERVED:
            raise InvalidSchema(
                f"the field {field.name} of {proto.name} has a number of Protobuf itself: {field.number}"
            )
        if field.name in names or (before and ends[before - 1] > field.number):
            raise InvalidSchema(f"the field {field.name} = {field.number} of {proto.name} is reserved")


def _field(proto: Any, field: Field, syntax: str, nested: Any) -> None:
    proto.name, proto.number, proto.label = field.name, field.number, _LABELS[field.label]
    maps = field.map_kinds
    if field.group is not None:
        proto.type, proto.type_name = _FIELD.TYPE_GROUP, field.kind
        _message(nested.add(), field.group, syntax)
    elif maps is not None:
        entry = nested.add(name=_camel_case(field.name) + "Entry")
        entry.options.map_entry = True
        for number, (name, kind) in enumerate(zip(("key", "value"), maps, strict=True), 1):
            _set_kind(entry.field.add(name=name, number=number, label=1), kind)
        proto.label, proto.type, proto.type_name = 3, _FIELD.TYPE_MESSAGE, entry.name
    else:
        _set_kind(proto, field.kind)
    if syntax == "proto3":
        if field.label == "required":
            raise InvalidSchema(f"the field {field.name} is required, which proto3 does not have")
        proto.proto3_optional = field.label == "optional"
    options = []
    for option in field.options:
        if option.name == "json_name":
            proto.json_name = str(option.value)
        elif option.name == "default":
            if syntax == "proto3":
                raise InvalidSchema(f"the field {field.name} has a default, which proto3 does not have")
            proto.default_value = _default(option.value, field.kind)
        else:
            options.append(option)
    _set_options(proto.options, options)


def _set_kind(proto: Any, kind: str) -> None:
    if kind in _KINDS:
        proto.type = _KINDS[kind]
    else:
        proto.type_name = kind


def _default(value: Value, kind: str) -> str:
    if isinstance(value, Word) and kind not in ("float", "double"):
        try:
            return str(int(value, 0))
        except ValueError:
            return str(value)
    if kind == "bytes":
        return str(text_format.text_encoding.CEscape(str(value).encode(errors="surrogateescape"), False))
    if not isinstance(value, str):
        raise InvalidSchema("a default is neither a number, a text nor a name")
    return str(value)


def _camel_case(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _enum(proto: Any, enum: Enum, syntax: str) -> None:
    proto.name = enum.name
    _set_options(proto.options, enum.options)
    if not enum.values:
        raise InvalidSchema(f"the enum {enum.name} has no values")
    if syntax == "proto3" and enum.values[0].number != 0:
        raise InvalidSchema(f"the first value of the enum {enum.name} must be 0 in proto3")
    numbers = {value.number for value in enum.values}
    if len(numbers) < len(enum.values) and not proto.options.allow_alias:
        raise InvalidSchema(f"values of the enum {enum.name} have the same number: set allow_alias, or change one")
    for value in enum.values:
        _set_options(proto.value.add(name=value.name, number=value.number).options, value.options)
    for part in (part for each in enum.reserved for part in each.parts):
        if isinstance(part, str):
            proto.reserved_name.append(part)
        else:
            proto.reserved_range.add(start=part[0], end=part[1])


def _extends(proto: Any, nested: Any, extends: Sequence[Extend], syntax: str) -> None:
    for extend in extends:
        for field in extend.fields:
            _field(proto.extension.add(extendee=extend.name), field, syntax, nested)


def _service(proto: Any, service: Service) -> None:
    proto.name = service.name
    _set_options(proto.options, service.options)
    for method in service.methods:
        added = proto.method.add(name=method.name, input_type=method.request, output_type=method.response)
        added.client_streaming, added.server_streaming = method.is_request_stream, method.is_response_stream
        _set_options(added.options, method.options)


def _set_options(proto: Any, options: Iterable[Option]) -> None:
    for option in options:
        if "(" in option.name:
            continue
        *outer, name = option.name.split(".")
        text = "".join(f"{each} {{ " for each in outer) + f"{name}: {_text(option.value)}" + " }" * len(outer)
        try:
            text_format.Parse(text, part := type(proto)(), allow_unknown_extension=True)
        except text_format.ParseError as error:
            raise InvalidSchema(f"the option {option.name[:100]} of the Protobuf schema is invalid: {error}") from None
        proto.MergeFrom(part)


def _text(value: Value) -> str:
    """Return a value in the text format."""
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str):
        return f'"{text_format.text_encoding.CEscape(value.encode(errors="surrogateescape"), False)}"'
    if isinstance(value, dict):
        return "{ " + " ".join(f"{name}: {_text(each)}" for name, each in value.items()) + " }"
    return "[" + ", ".join(_text(each) for each in value) + "]"


# -- from a descriptor to declarations ---------------------------------------------------------------------------------


class _Reader:
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._syntax = ""

    def file(self, proto: Any) -> ProtoFile:
        self._syntax = proto.syntax or "proto2"
        if self._syntax == "editions":
            self._syntax = _Proto.Edition.Name(proto.edition).removeprefix("EDITION_")
        public = {proto.dependency[number] for number in proto.public_dependency}
        return ProtoFile(
            self._syntax,
            proto.package,
            [each for each in proto.dependency if each not in public],
            [each for each in proto.dependency if each in public],
            self._options(proto.options),
            [self._message(each) for each in proto.message_type],
            [self._enum(each) for each in proto.enum_type],
            [self._service(each) for each in proto.service],
            self._extends(proto.extension),
        )

    def _message(self, proto: Any) -> Message:
        oneofs = [OneOf(each.name, options=self._options(each.options)) for each in proto.oneof_decl]
        message = Message(proto.name, options=self._options(proto.options))
        groups = {each.type_name.rpartition(".")[2] for each in proto.field if each.type == _FIELD.TYPE_GROUP}
        nested = {each.name: self._message(each) for each in proto.nested_type}
        for each in proto.field:
            in_oneof = each.HasField("oneof_index") and not each.proto3_optional
            (oneofs[each.oneof_index].fields if in_oneof else message.fields).append(
                self._field(each, nested, in_oneof=in_oneof)
            )
        message.oneofs = [each for each in oneofs if each.fields]
        message.messages = [each for each in nested.values() if each.name not in groups]
        message.enums = [self._enum(each) for each in proto.enum_type]
        ranges = [Reserved([(each.start, each.end - 1)]) for each in proto.reserved_range]
        message.reserved = [*ranges, *(Reserved([name]) for name in proto.reserved_name)]
        message.extensions = [
            Extensions([(each.start, min(each.end - 1, FIELD_NUMBER_MAX))], self._options(each.options))
            for each in proto.extension_range
        ]
        message.extends = self._extends(proto.extension)
        return message

    def _field(self, proto: Any, nested: dict[str, Message], *, in_oneof: bool = False) -> Field:
        is_group = proto.type == _FIELD.TYPE_GROUP
        name = proto.type_name.rpartition(".")[2]
        kind = name if is_group else proto.type_name or _KIND_NAMES[proto.type]
        label = {1: "optional", 2: "required", 3: "repeated"}[proto.label]
        is_plain = label == "optional" and not proto.proto3_optional and self._syntax != "proto2"
        options = self._options(proto.options)
        if proto.HasField("default_value"):
            is_text = proto.type in (_FIELD.TYPE_STRING, _FIELD.TYPE_BYTES)
            value = proto.default_value
            if proto.type == _FIELD.TYPE_BYTES:
                value = text_format.text_encoding.CUnescape(value).decode(errors="surrogateescape")
            options.append(Option("default", value if is_text else Word(value)))
        if proto.HasField("json_name"):
            options.append(Option("json_name", proto.json_name))
        group = nested.get(name, Message(name)) if is_group else None
        return Field(proto.name, kind, proto.number, "" if in_oneof or is_plain else label, options, group)

    def _extends(self, fields: Iterable[Any]) -> list[Extend]:
        found: dict[str, list[Field]] = {}
        for each in fields:
            found.setdefault(each.extendee, []).append(self._field(each, {}))
        return [Extend(name, members) for name, members in found.items()]

    def _enum(self, proto: Any) -> Enum:
        values = [EnumValue(each.name, each.number, self._options(each.options)) for each in proto.value]
        ranges = [Reserved([(each.start, each.end)]) for each in proto.reserved_range]
        names = [Reserved([name]) for name in proto.reserved_name]
        return Enum(proto.name, values, self._options(proto.options), [*ranges, *names])

    def _service(self, proto: Any) -> Service:
        methods = [
            Method(
                each.name,
                each.input_type,
                each.output_type,
                each.client_streaming,
                each.server_streaming,
                self._options(each.options),
            )
            for each in proto.method
        ]
        return Service(proto.name, methods, self._options(proto.options))

    def _options(self, proto: Any) -> list[Option]:
        """Return the options. Custom ones have a name if the file that defines them is imported."""
        try:
            own = self._pool.FindMessageTypeByName(proto.DESCRIPTOR.full_name)
        except KeyError:
            pass
        else:
            parsed = message_factory.GetMessageClass(own)()
            parsed.ParseFromString(proto.SerializeToString())
            proto = parsed
        found = []
        for field, value in proto.ListFields():
            name = f"({field.full_name})" if field.is_extension else field.name
            values = value if field.is_repeated else [value]
            found += [Option(name, _option_value(field, each)) for each in values]
        return found


def _option_value(field: Any, value: Any) -> Value:
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            raise InvalidSchema(f"the option {field.full_name} has a map at its top, which this registry cannot read")
        return _option_fields(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return Word(named.name if named is not None else str(value))
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, bool):
        return Word("true" if value else "false")
    return value if isinstance(value, str) else Word(repr(value))


def _option_fields(message: Any) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for field, value in message.ListFields():
        name = f"[{field.full_name}]" if field.is_extension else field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            found[name] = [
                {"key": _option_value(entry["key"], key), "value": _option_value(entry["value"], value[key])}
                for key in sorted(value)
            ]
        elif field.is_repeated:
            found[name] = [_option_value(field, each) for each in value]
        else:
            found[name] = _option_value(field, value)
    return found
