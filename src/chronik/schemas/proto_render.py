"""The canonical text of a Protobuf file, as other registries store it, and its normal form.

The canonical text keeps names as they are written and the order of types, because records name a type by its place. The
order is: imports, options, messages, enums, extensions, services; inside a message reserved numbers, options, fields,
oneofs, groups, extension ranges, extensions, nested types. Comments are left out. The normal form also sorts imports,
options, fields and numbers, and resolves the names of types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from chronik.schemas.proto_file import (
    FIELD_NUMBER_MAX,
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
    Range,
    Reserved,
    Service,
    Value,
    Word,
)

Resolve = Callable[[str, str], str]
"""Return the absolute name of a type that is written inside a scope, with its leading dot."""
_ESCAPES = {
    "\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v",
    "\\": "\\\\", "'": "\\'", '"': '\\"',
}  # fmt: skip

_LAST_OPTIONS = {"default": 1, "json_name": 2}


def canonical_text(file: ProtoFile) -> str:
    return _Renderer(None, {}).file(file)


def normal_text(file: ProtoFile, resolve: Resolve, map_entries: dict[str, tuple[str, str]]) -> str:
    """`map_entries` has the types of key and value of the messages that are entries of maps, by absolute name."""
    return _Renderer(resolve, map_entries).file(file)


class _Renderer:
    def __init__(self, resolve: Resolve | None, map_entries: dict[str, tuple[str, str]]) -> None:
        self._resolve = resolve
        self._map_entries = map_entries

    @property
    def _is_normal(self) -> bool:
        return self._resolve is not None

    def _sorted(self, values: Sequence[Field]) -> Sequence[Field]:
        return sorted(values, key=lambda each: each.number) if self._is_normal else values

    def file(self, file: ProtoFile) -> str:
        parts = []
        if file.syntax and not (self._is_normal and file.syntax == "proto2"):
            parts.append(f'{"edition" if file.is_edition else "syntax"} = "{file.syntax}";\n')
        if file.package:
            parts.append(f"package {file.package};\n")
        if file.imports or file.public_imports:
            imports, public = file.imports, file.public_imports
            if self._is_normal:
                imports, public = sorted(set(imports)), sorted(set(public))
            parts.append("\n")
            parts += [f'import "{_escaped(name)}";\n' for name in imports]
            parts += [f'import public "{_escaped(name)}";\n' for name in public]
        scope = f".{file.package}" if file.package else ""
        blocks: list[list[str]] = [
            [self._statement(each) for each in self._options(file.options)],
            [
                *(self._message(each, scope) for each in self._declared(file.messages, scope)),
                *(self._enum(each) for each in file.enums),
            ],
            [self._extend(each, scope) for each in self._extends(file.extends, scope)],
            [self._service(each, scope) for each in file.services],
        ]
        for block in blocks:
            if block:
                parts += ["\n", *block]
        return "".join(parts)

    def _declared(self, messages: Sequence[Message], scope: str) -> Sequence[Message]:
        """Leave out the entries of maps in the normal form, which writes the maps themselves."""
        if not self._is_normal:
            return messages
        return [each for each in messages if f"{scope}.{each.name}" not in self._map_entries]

    # -- types ---------------------------------------------------------------------------------------------------------

    def _message(self, message: Message, scope: str) -> str:
        inner = f"{scope}.{message.name}"
        return f"message {message.name} {self._body(message, inner)}\n"

    def _body(self, message: Message, inner: str) -> str:
        oneofs = message.oneofs
        if self._is_normal:
            numbers = {id(each): min((field.number for field in each.fields), default=0) for each in oneofs}
            oneofs = sorted((each for each in oneofs if each.fields), key=lambda each: numbers[id(each)])
        plain = [each for each in message.fields if each.group is None]
        groups = [each for each in message.fields if each.group is not None]
        blocks = [
            self._reserved(message.reserved),
            [self._statement(each) for each in self._options(message.options)],
            [self._field(each, inner) for each in self._sorted(plain)],
            [self._oneof(each, inner) for each in oneofs],
            [self._group(each, inner) for each in self._sorted(groups)],
            [self._extensions(each) for each in self._split(message.extensions)],
            [self._extend(each, inner) for each in self._extends(message.extends, inner)],
            [
                *(self._message(each, inner) for each in self._declared(message.messages, inner)),
                *(self._enum(each) for each in message.enums),
            ],
        ]
        parts = ["{"]
        for block in blocks:
            if block:
                parts += ["\n", *map(_indented, block)]
        return "".join([*parts, "}"])

    def _enum(self, enum: Enum) -> str:
        parts = [f"enum {enum.name} {{"]
        reserved = self._reserved(enum.reserved)
        if reserved or enum.options or enum.values:
            parts.append("\n")
        parts += map(_indented, reserved)
        parts += [_indented(self._statement(each)) for each in self._options(enum.options)]
        values = enum.values
        if self._is_normal:
            values = sorted(values, key=lambda each: (each.number, each.name))
        parts += [_indented(self._enum_value(each)) for each in values]
        return "".join([*parts, "}\n"])

    def _enum_value(self, value: EnumValue) -> str:
        return f"{value.name} = {value.number}{self._bracketed(value.options)};\n"

    def _oneof(self, oneof: OneOf, scope: str) -> str:
        parts = [f"oneof {oneof.name} {{"]
        options = [self._statement(each) for each in self._options(oneof.options)]
        fields = [
            (self._field if each.group is None else self._group)(each, scope) for each in self._sorted(oneof.fields)
        ]
        for block in (options, fields):
            if block:
                parts += ["\n", *map(_indented, block)]
        return "".join([*parts, "}\n"])

    def _field(self, field: Field, scope: str) -> str:
        label, kind = field.label, field.kind
        if self._resolve is not None:
            entry = None
            if field.map_kinds is None:
                kind = self._resolve(kind, scope)
                entry = self._map_entries.get(kind)
            if field.map_kinds or entry:
                key, value = field.map_kinds or entry or ("", "")
                kind, label = f"map<{key}, {self._resolve(value, scope)}>", ""
        # As in other registries, these two are the last options.
        options = sorted(field.options, key=lambda each: _LAST_OPTIONS.get(each.name, 0))
        return f"{label + ' ' if label else ''}{kind} {field.name} = {field.number}{self._bracketed(options)};\n"

    def _group(self, field: Field, scope: str) -> str:
        assert field.group is not None
        label = f"{field.label} " if field.label else ""
        body = self._body(field.group, f"{scope}.{field.kind}")
        return f"{label}group {field.kind} = {field.number}{self._bracketed(field.options)} {body}\n"

    def _extends(self, extends: Sequence[Extend], scope: str) -> Sequence[Extend]:
        if self._resolve is None:
            return extends
        merged: dict[str, list[Field]] = {}
        for each in extends:
            merged.setdefault(self._resolve(each.name, scope), []).extend(each.fields)
        return [Extend(name, fields) for name, fields in merged.items()]

    def _extend(self, extend: Extend, scope: str) -> str:
        fields = [
            (self._field if each.group is None else self._group)(each, scope) for each in self._sorted(extend.fields)
        ]
        inner = "".join(["\n", *map(_indented, fields)]) if fields else ""
        return f"extend {extend.name} {{{inner}}}\n"

    def _service(self, service: Service, scope: str) -> str:
        options = [self._statement(each) for each in self._options(service.options)]
        methods = [self._method(each, scope) for each in service.methods]
        parts = [f"service {service.name} {{"]
        for block in (options, methods):
            if block:
                parts += ["\n", *map(_indented, block)]
        return "".join([*parts, "}\n"])

    def _method(self, method: Method, scope: str) -> str:
        request, response = method.request, method.response
        if self._resolve is not None:
            request, response = self._resolve(request, scope), self._resolve(response, scope)
        streams = ["stream " if each else "" for each in (method.is_request_stream, method.is_response_stream)]
        options = [_indented(self._statement(each)) for each in self._options(method.options)]
        body = "".join([" {\n", *options, "}"]) if options else ""
        return f"rpc {method.name} ({streams[0]}{request}) returns ({streams[1]}{response}){body};\n"

    # -- numbers -------------------------------------------------------------------------------------------------------

    def _reserved(self, reserved: Sequence[Reserved]) -> list[str]:
        if self._is_normal:
            parts = [part for each in reserved for part in each.parts]
            parts.sort(key=lambda part: (part[0], "") if isinstance(part, tuple) else (FIELD_NUMBER_MAX + 1, part))
            reserved = [Reserved([part]) for part in parts]
        return [f"reserved {', '.join(self._part(part) for part in each.parts)};\n" for each in reserved]

    def _split(self, extensions: Sequence[Extensions]) -> Sequence[Extensions]:
        if not self._is_normal:
            return extensions
        single = [Extensions([part], each.options) for each in extensions for part in each.ranges]
        return sorted(single, key=lambda each: each.ranges[0])

    def _extensions(self, extensions: Extensions) -> str:
        ranges = ", ".join(self._part(each) for each in extensions.ranges)
        return f"extensions {ranges}{self._bracketed(extensions.options)};\n"

    def _part(self, part: Range | str) -> str:
        if isinstance(part, str):
            return f'"{_escaped(part)}"'
        first, last = part
        return str(first) if first == last else f"{first} to {'max' if last >= FIELD_NUMBER_MAX else last}"

    # -- options -------------------------------------------------------------------------------------------------------

    def _options(self, options: Sequence[Option]) -> Sequence[Option]:
        return sorted(options, key=lambda each: each.name) if self._is_normal else options

    def _statement(self, option: Option) -> str:
        return f"option {self._option(option)};\n"

    def _option(self, option: Option) -> str:
        if isinstance(option.value, list):
            return f"{option.name} = {self._listed([self._value(each) for each in option.value])}"
        return f"{option.name} = {self._value(option.value)}"

    def _bracketed(self, options: Sequence[Option]) -> str:
        return f" {self._listed([self._option(each) for each in self._options(options)])}" if options else ""

    def _listed(self, texts: list[str]) -> str:
        if len(texts) == 1:
            return f"[{texts[0]}]"
        return "".join(["[\n", *_separated(texts), "]"])

    def _value(self, value: Value) -> str:
        if isinstance(value, Word):
            return _plain_number(value) if self._is_normal else str(value)
        if isinstance(value, str):
            return f'"{_escaped(value)}"'
        if isinstance(value, dict):
            items = sorted(value.items()) if self._is_normal else value.items()
            texts = [f"{name}: {self._value(each)}" for name, each in items if each != [] or not self._is_normal]
            return "".join(["{\n", *_separated(texts), "}"])
        if self._is_normal and len(value) == 1:
            return self._value(value[0])
        return "".join(["[\n", *_separated([self._value(each) for each in value]), "]"])


def _separated(texts: Iterable[str]) -> list[str]:
    """Indent each text, with a comma after all but the last one."""
    listed = list(texts)
    return [_indented(text + ("," if number < len(listed) - 1 else "")) for number, text in enumerate(listed)]


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.removesuffix("\n").split("\n"))


def _escaped(text: str) -> str:
    found = []
    for character in text:
        if 0xDC80 <= ord(character) <= 0xDCFF:
            # A byte that is not UTF-8.
            found.append(f"\\{ord(character) - 0xDC00:03o}")
        elif character in _ESCAPES:
            found.append(_ESCAPES[character])
        else:
            found.append(character if character >= " " else f"\\{ord(character):03o}")
    return "".join(found)


def _plain_number(word: Word) -> str:
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return str(word)
    return str(int(number)) if number.is_integer() and abs(number) < 1 << 53 else repr(number)
