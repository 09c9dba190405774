"""The compiled loop that decodes Protobuf into Arrow's buffers. It creates no Python object per record.

It reads a record once, and expects what every serializer writes: the fields of a message in the order of their
numbers, a field that is not repeated once, the items of a repeated field together. Protobuf allows more. A record that
uses that gets the fault UNORDERED; `protobuf` then lets Google's library write it in this order.

A row of `fields` describes a field of a message: its columns are below. A row of `messages` has the first of its fields
and the one after the last. Memory and slots are those of `avro_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from chronik.pipeline.source.columns import CALENDAR_US_MAX, CALENDAR_US_MIN
from chronik.pipeline.typed.avro_kernel import BYTE_AT, END_AT, NUMBER_AT, VALID_AT, copy_bytes, is_utf8

NUMBER, CODE, SLOT, FLAGS, ITEM, CHILD, COUNTED, ONEOF, NULLS, NULLS_END = range(10)
"""ITEM is the slot of the items of a repeated field, CHILD the message of a field, COUNTED the slot that counts items.
NULLS: the slots that get a null or an empty value if the field is not there. A slot of -1 does not exist."""
REPEATED, EXPLICIT, REQUIRED = 1, 2, 4
"""Flags. EXPLICIT: a field that is not there is null, and not its type's empty value."""

BOOL, INT, LONG, UINT, ULONG, SINT, SLONG = range(7)
FIXED, SFIXED, FIXED_LONG, SFIXED_LONG, FLOAT, DOUBLE, TEXT, BYTES, MESSAGE, TIMESTAMP = range(7, 17)
VARINT_WIRE, WIDE_WIRE, SIZED_WIRE, NARROW_WIRE = 0, 1, 2, 5
DEPTH_MAX = 64

UNORDERED = 100
FAULTS = {
    1: "the value ends too early",
    2: "a number has more than 64 bits",
    3: "a field has the number 0, or an unknown encoding",
    4: "a length is beyond the value's end",
    5: "a text is not valid UTF-8",
    6: "a required field is missing",
    9: "a time is outside the years 1 to 9999",
}
SECOND_US = 1_000_000
SECONDS_MIN, SECONDS_MAX = CALENDAR_US_MIN // SECOND_US, CALENDAR_US_MAX // SECOND_US

njit: Callable[[Any], Any] = numba.njit(cache=True, nogil=True)


@njit
def _varint(data, at, end):  # type: ignore[no-untyped-def]
    """Return a number, where it ends, and a fault."""
    number = np.uint64(0)
    shift = np.uint64(0)
    while True:
        if at >= end:
            return number, at, 1
        byte = np.uint64(data[at])
        at += 1
        if shift == np.uint64(63) and byte > np.uint64(1):
            return number, at, 2
        number |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            return number, at, 0
        shift += np.uint64(7)


@njit
def _length(data, at, end):  # type: ignore[no-untyped-def]
    number, at, fault = _varint(data, at, end)
    if fault == 0 and number > np.uint64(end - at):
        fault = 4
    return np.int64(number), at, fault


@njit
def _skip(data, at, end, wire):  # type: ignore[no-untyped-def]
    """Return where an unknown field ends, and a fault. A group ends with its own tag."""
    depth = 0
    while True:
        if wire == VARINT_WIRE:
            _, at, fault = _varint(data, at, end)
        elif wire == SIZED_WIRE:
            length, at, fault = _length(data, at, end)
            at += length if fault == 0 else 0
        elif wire in (WIDE_WIRE, NARROW_WIRE):
            size = 8 if wire == WIDE_WIRE else 4
            fault = 0 if size <= end - at else 1
            at += size
        elif wire == 3:
            depth += 1
            fault = 0
        elif wire == 4 and depth > 0:
            depth -= 1
            fault = 0
        else:
            return at, 3
        if fault != 0 or depth == 0:
            return at, fault
        tag, at, fault = _varint(data, at, end)
        if fault != 0:
            return at, fault
        wire = np.int64(tag & np.uint64(7))


@njit
def _wire_of(code):  # type: ignore[no-untyped-def]
    if code <= SLONG:
        return VARINT_WIRE
    if code in (FIXED, SFIXED, FLOAT):
        return NARROW_WIRE
    if code in (FIXED_LONG, SFIXED_LONG, DOUBLE):
        return WIDE_WIRE
    return SIZED_WIRE


@njit
def _scalar(data, at, end, code):  # type: ignore[no-untyped-def]
    """Return a number as the slot's word, where it ends, and a fault."""
    wire = _wire_of(code)
    if wire == VARINT_WIRE:
        raw, at, fault = _varint(data, at, end)
        if fault != 0:
            return np.int64(0), at, fault
        if code == BOOL:
            return np.int64(1) if raw != np.uint64(0) else np.int64(0), at, 0
        if code == INT:
            return np.int64(np.int32(raw & np.uint64(0xFFFFFFFF))), at, 0
        if code == UINT:
            return np.int64(raw & np.uint64(0xFFFFFFFF)), at, 0
        if code == SINT:
            raw &= np.uint64(0xFFFFFFFF)
        if code in (SINT, SLONG):
            return np.int64(raw >> np.uint64(1)) ^ -np.int64(raw & np.uint64(1)), at, 0
        return np.int64(raw), at, 0
    size = 8 if wire == WIDE_WIRE else 4
    if size > end - at:
        return np.int64(0), at, 1
    bits = np.uint64(0)
    for i in range(size):
        bits |= np.uint64(data[at + i]) << np.uint64(8 * i)
    number = np.int64(np.int32(bits)) if code == SFIXED else np.int64(bits)
    return number, at + size, 0


@njit
def _timestamp(data, at, end):  # type: ignore[no-untyped-def]
    """Return microseconds, and a fault. The later value of a field that is there twice counts."""
    seconds, nanos = np.int64(0), np.int64(0)
    while at < end:
        tag, at, fault = _varint(data, at, end)
        if fault != 0:
            return np.int64(0), fault
        if tag == np.uint64(8) or tag == np.uint64(16):
            raw, at, fault = _varint(data, at, end)
            if tag == np.uint64(8):
                seconds = np.int64(raw)
            else:
                nanos = np.int64(np.int32(raw & np.uint64(0xFFFFFFFF)))
        else:
            at, fault = _skip(data, at, end, np.int64(tag & np.uint64(7)))
        if fault != 0:
            return np.int64(0), fault
    if seconds < SECONDS_MIN or seconds > SECONDS_MAX or nanos < 0 or nanos > 999_999_999:
        return np.int64(0), 9
    return seconds * SECOND_US + nanos // 1000, 0


@njit
def _put_absent(slot, words, is_valid, slots, counts, sizes, valid, numbers, ends):  # type: ignore[no-untyped-def]
    """Give a slot a null, or an empty value."""
    place = counts[slot]
    valid[slots[slot, VALID_AT] + place] = is_valid
    if slots[slot, END_AT] >= 0:
        ends[slots[slot, END_AT] + place + 1] = sizes[slot]
    for word in range(words):
        numbers[slots[slot, NUMBER_AT] + place * words + word] = 0
    counts[slot] = place + 1


@njit
def _close_list(slot, counted, slots, counts, sizes, valid, ends):  # type: ignore[no-untyped-def]
    place = counts[slot]
    sizes[slot] = counts[counted]
    valid[slots[slot, VALID_AT] + place] = 1
    ends[slots[slot, END_AT] + place + 1] = sizes[slot]
    counts[slot] = place + 1


@njit
def _put_value(data, at, end, code, slot, slots, counts, sizes, valid, numbers, ends, content):  # type: ignore[no-untyped-def]
    """Decode one value into its slot. Return where it ends, and a fault."""
    place = counts[slot]
    if code in (TEXT, BYTES):
        length, at, fault = _length(data, at, end)
        if fault != 0:
            return at, fault
        is_ascii = copy_bytes(data, at, content, slots[slot, BYTE_AT] + sizes[slot], length)
        if code == TEXT and not is_ascii and not is_utf8(data, at, at + length):
            return at, 5
        sizes[slot] += length
        ends[slots[slot, END_AT] + place + 1] = sizes[slot]
        at += length
    elif code == TIMESTAMP:
        length, at, fault = _length(data, at, end)
        if fault != 0:
            return at, fault
        number, fault = _timestamp(data, at, at + length)
        if fault != 0:
            return at, fault
        numbers[slots[slot, NUMBER_AT] + place] = number
        at += length
    else:
        number, at, fault = _scalar(data, at, end, code)
        if fault != 0:
            return at, fault
        if code in (ULONG, FIXED_LONG):
            numbers[slots[slot, NUMBER_AT] + place * 2] = number
            numbers[slots[slot, NUMBER_AT] + place * 2 + 1] = 0
        else:
            numbers[slots[slot, NUMBER_AT] + place] = number
    valid[slots[slot, VALID_AT] + place] = 1
    counts[slot] = place + 1
    return at, 0


@njit
def decode(  # type: ignore[no-untyped-def]
    data, starts, stops, messages, fields, nulls, seen, slots, counts, sizes, valid, numbers, ends, content, faults
):
    """Decode the records data[start:stop] of the message 0, and set each record's fault, 0 if there is none."""
    saved_counts = counts.copy()
    saved_sizes = sizes.copy()
    outer_end = np.zeros(DEPTH_MAX, np.int64)
    outer_cursor = np.zeros(DEPTH_MAX, np.int64)
    outer_message = np.zeros(DEPTH_MAX, np.int64)
    outer_stamp = np.zeros(DEPTH_MAX, np.int64)
    stamps = np.int64(0)
    for row in range(len(starts)):
        at = np.int64(starts[row])
        end = np.int64(stops[row])
        saved_counts[:] = counts
        saved_sizes[:] = sizes
        fault = 0
        depth = 0
        message = np.int64(0)
        cursor = messages[0, 0]
        stamps += 1
        stamp = stamps
        while True:
            number = np.int64(0)
            wire = np.int64(0)
            is_end = at >= end
            limit = messages[message, 1]
            if not is_end:
                tag, at, fault = _varint(data, at, end)
                number, wire = np.int64(tag >> np.uint64(3)), np.int64(tag & np.uint64(7))
                if fault == 0 and number == 0:
                    fault = 3
                if fault != 0:
                    break
            # The fields before this one, or at the end all other ones, are not there.
            while cursor < limit and (is_end or fields[cursor, NUMBER] < number):
                flags = fields[cursor, FLAGS]
                if flags & REQUIRED:
                    fault = 6
                    break
                if flags & REPEATED:
                    _close_list(fields[cursor, SLOT], fields[cursor, COUNTED], slots, counts, sizes, valid, ends)
                else:
                    is_valid = 0 if flags & EXPLICIT else 1
                    for i in range(fields[cursor, NULLS], fields[cursor, NULLS_END]):
                        _put_absent(nulls[i, 0], nulls[i, 1], is_valid, slots, counts, sizes, valid, numbers, ends)
                cursor += 1
            if fault != 0:
                break
            if is_end:
                if depth == 0:
                    break
                depth -= 1
                end = outer_end[depth]
                cursor = outer_cursor[depth]
                message = outer_message[depth]
                stamp = outer_stamp[depth]
                if not fields[cursor, FLAGS] & REPEATED:
                    cursor += 1
                    continue
                # The next item of a repeated message, or the end of the list.
                number = fields[cursor, NUMBER]
                is_next = False
                if at < end:
                    tag, after, fault = _varint(data, at, end)
                    if fault != 0:
                        break
                    is_next = tag == np.uint64(number * 8 + SIZED_WIRE)
                if not is_next:
                    _close_list(fields[cursor, SLOT], fields[cursor, COUNTED], slots, counts, sizes, valid, ends)
                    cursor += 1
                    continue
                at = after
                wire = np.int64(SIZED_WIRE)
            elif cursor >= limit or fields[cursor, NUMBER] != number:
                for known in range(messages[message, 0], cursor):
                    if fields[known, NUMBER] == number:
                        fault = UNORDERED
                if fault == 0:
                    at, fault = _skip(data, at, end, wire)
                if fault != 0:
                    break
                continue
            code = fields[cursor, CODE]
            is_repeated = fields[cursor, FLAGS] & REPEATED
            own_wire = _wire_of(code)
            is_packed = is_repeated and wire == SIZED_WIRE and own_wire != SIZED_WIRE
            if wire != own_wire and not is_packed:
                # As in Google's library, a field with another encoding is an unknown one.
                at, fault = _skip(data, at, end, wire)
                if fault != 0:
                    break
                continue
            if fields[cursor, ONEOF] >= 0:
                if seen[fields[cursor, ONEOF]] == stamp:
                    fault = UNORDERED
                    break
                seen[fields[cursor, ONEOF]] = stamp
            if code == MESSAGE:
                length, at, fault = _length(data, at, end)
                if fault != 0:
                    break
                slot = fields[cursor, ITEM] if is_repeated else fields[cursor, SLOT]
                if slot >= 0:
                    valid[slots[slot, VALID_AT] + counts[slot]] = 1
                    counts[slot] += 1
                outer_end[depth] = end
                outer_cursor[depth] = cursor
                outer_message[depth] = message
                outer_stamp[depth] = stamp
                depth += 1
                end = at + length
                message = fields[cursor, CHILD]
                cursor = messages[message, 0]
                stamps += 1
                stamp = stamps
                continue
            if not is_repeated:
                at, fault = _put_value(
                    data, at, end, code, fields[cursor, SLOT], slots, counts, sizes, valid, numbers, ends, content
                )
                if fault != 0:
                    break
                cursor += 1
                continue
            item = fields[cursor, ITEM]
            while True:
                stop = at
                if is_packed:
                    length, at, fault = _length(data, at, end)
                    stop = at + length
                if fault == 0 and not is_packed:
                    at, fault = _put_value(
                        data, at, end, code, item, slots, counts, sizes, valid, numbers, ends, content
                    )
                while fault == 0 and is_packed and at < stop:
                    at, fault = _put_value(
                        data, at, stop, code, item, slots, counts, sizes, valid, numbers, ends, content
                    )
                if fault != 0 or at >= end:
                    break
                tag, after, fault = _varint(data, at, end)
                if fault != 0:
                    break
                wire = np.int64(tag & np.uint64(7))
                if np.int64(tag >> np.uint64(3)) != number or (wire != own_wire and wire != SIZED_WIRE):
                    break
                is_packed = wire == SIZED_WIRE and own_wire != SIZED_WIRE
                at = after
            if fault != 0:
                break
            _close_list(fields[cursor, SLOT], fields[cursor, COUNTED], slots, counts, sizes, valid, ends)
            cursor += 1
        faults[row] = fault
        if fault != 0:
            counts[:] = saved_counts
            sizes[:] = saved_sizes
