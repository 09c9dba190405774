"""The compiled loop that decodes Avro into Arrow's buffers. It creates no Python object per record.

It runs a program, which `avro` makes of a schema: a list of instructions (code, slot, argument, argument). So one
compiled function serves every schema. A slot is one Arrow array that the program fills; several pools of memory hold
the buffers of all slots. numba checks no index, so the code checks each read against the end of the record. Writes need
no check, because the pools are large enough for any record: each slot has one place for each row, or inside an array or
a map, one for each byte of the input (each item takes at least one byte).

A record that cannot be decoded leaves nothing in the buffers: the counts of all slots are set back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from chronik.pipeline.source.columns import CALENDAR_US_MAX, CALENDAR_US_MIN

# Instructions. The arguments are those after the slot.
NULL, SET, BOOL, INT, LONG, FLOAT, DOUBLE, BYTES, TEXT, FIXED, ENUM = range(11)
"""SET marks a struct as present. FIXED has a size, ENUM the number of its symbols."""
DECIMAL, DECIMAL_FIXED, DATE, MILLIS, MICROS, NANOS = range(11, 17)
"""DECIMAL has the number of its digits, DECIMAL_FIXED its size and its digits."""
UNION, JUMP, LOOP, NEXT = range(17, 21)
"""UNION has the place of its branches and their number, JUMP its target. LOOP and NEXT: the number of the loop, and
the instruction after the loop (LOOP) or the first one in it (NEXT)."""

# Columns of the table of slots.
VALID_AT, NUMBER_AT, END_AT, BYTE_AT = range(4)

FAULTS = {
    1: "the value ends too early",
    2: "a number has more than 64 bits",
    3: "a number does not fit in 32 bits",
    4: "a length is negative, or is beyond the value's end",
    5: "a text is not valid UTF-8",
    6: "an enum has no such symbol",
    7: "a union has no such branch",
    8: "a decimal has more digits than its schema allows",
    9: "a time is outside the years 1 to 9999",
    10: "there are bytes after the value",
    11: "a boolean is neither 0 nor 1",
}
DAY_US = 86_400_000_000
DATE_MIN, DATE_MAX = CALENDAR_US_MIN // DAY_US, CALENDAR_US_MAX // DAY_US
MS_MIN, MS_MAX = CALENDAR_US_MIN // 1000, CALENDAR_US_MAX // 1000

njit: Callable[[Any], Any] = numba.njit(cache=True, nogil=True)


@njit
def _long(data, at, end):  # type: ignore[no-untyped-def]
    """Return a zigzag number, where it ends, and a fault."""
    number = np.uint64(0)
    shift = np.uint64(0)
    while True:
        if at >= end:
            return np.int64(0), at, 1
        byte = np.uint64(data[at])
        at += 1
        if shift == np.uint64(63) and byte > np.uint64(1):
            return np.int64(0), at, 2
        number |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            break
        shift += np.uint64(7)
    return np.int64(number >> np.uint64(1)) ^ -np.int64(number & np.uint64(1)), at, 0


@njit
def is_utf8(data, at, end):  # type: ignore[no-untyped-def]
    while at < end:
        byte = data[at]
        if byte < 0x80:
            at += 1
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        else:
            return False
        if at + more >= end or data[at + 1] < low or data[at + 1] > high:
            return False
        for i in range(2, more + 1):
            if data[at + i] < 0x80 or data[at + i] > 0xBF:
                return False
        at += more + 1
    return True


@njit
def copy_bytes(source, at, target, to, length):  # type: ignore[no-untyped-def]
    """Copy bytes, and return whether all of them are ASCII."""
    source_at, target_at, seen = np.uint64(at), np.uint64(to), np.uint8(0)
    for i in range(np.uint64(length)):
        byte = source[source_at + i]
        seen |= byte
        target[target_at + i] = byte
    return seen < 0x80


@njit
def _decimal(data, at, length, digits, powers, numbers, to):  # type: ignore[no-untyped-def]
    """Read a big-endian number as the two little-endian words of decimal128. Return a fault."""
    negative = length > 0 and data[at] >= 0x80
    fill = np.uint8(0xFF) if negative else np.uint8(0)
    while length > 16:
        if data[at] != fill:
            return 8
        at += 1
        length -= 1
    low = np.uint64(0xFFFFFFFFFFFFFFFF) if negative else np.uint64(0)
    high = low
    for i in range(length):
        high = (high << np.uint64(8)) | (low >> np.uint64(56))
        low = (low << np.uint64(8)) | np.uint64(data[at + i])
    # The magnitude has to be below 10 ** digits.
    size_low, size_high = low, high
    if (high >> np.uint64(63)) != np.uint64(0):
        size_low = ~low + np.uint64(1)
        size_high = ~high + (np.uint64(1) if size_low == np.uint64(0) else np.uint64(0))
    limit_high, limit_low = powers[digits, 0], powers[digits, 1]
    if size_high > limit_high or (size_high == limit_high and size_low >= limit_low):
        return 8
    numbers[to] = np.int64(low)
    numbers[to + 1] = np.int64(high)
    return 0


@njit
def decode(  # type: ignore[no-untyped-def]
    data, starts, stops, program, branches, slots, counts, sizes, loops, powers, valid, numbers, ends, content, faults
):
    """Decode the records data[start:stop], and set each record's fault, 0 if there is none."""
    saved_counts = counts.copy()
    saved_sizes = sizes.copy()
    instructions = len(program)
    for row in range(len(starts)):
        at = np.int64(starts[row])
        end = np.int64(stops[row])
        saved_counts[:] = counts
        saved_sizes[:] = sizes
        fault = 0
        step = 0
        while step < instructions:
            code = program[step, 0]
            slot = program[step, 1]
            first = program[step, 2]
            step += 1
            if code == UNION:
                branch, at, fault = _long(data, at, end)
                if fault == 0 and (branch < 0 or branch >= program[step - 1, 3]):
                    fault = 7
                if fault != 0:
                    break
                step = branches[first + branch]
                continue
            if code == JUMP:
                step = first
                continue
            if code in (LOOP, NEXT):
                left = np.int64(0)
                if code == NEXT:
                    left = loops[first] - 1
                if left == 0:
                    left, at, fault = _long(data, at, end)
                    if fault == 0 and left < 0:
                        _, at, fault = _long(data, at, end)
                        left = -left
                    # Each item takes at least one byte.
                    if fault == 0 and (left < 0 or left > end - at):
                        fault = 4
                    if fault != 0:
                        break
                loops[first] = left
                if (code == LOOP and left == 0) or (code == NEXT and left > 0):
                    step = program[step - 1, 3]
                continue
            place = counts[slot]
            number_at = slots[slot, NUMBER_AT] + place
            if code == NULL:
                valid[slots[slot, VALID_AT] + place] = 0
                if slots[slot, END_AT] >= 0:
                    ends[slots[slot, END_AT] + place + 1] = sizes[slot]
                if slots[slot, NUMBER_AT] >= 0:
                    if first == 2:
                        number_at += place
                        numbers[number_at + 1] = 0
                    numbers[number_at] = 0
                elif slots[slot, BYTE_AT] >= 0 and slots[slot, END_AT] < 0:
                    for i in range(first):  # a fixed value
                        content[slots[slot, BYTE_AT] + sizes[slot] + i] = 0
                    sizes[slot] += first
                counts[slot] = place + 1
                continue
            if code in (BYTES, TEXT, DECIMAL):
                length, at, fault = _long(data, at, end)
                if fault == 0 and (length < 0 or length > end - at):
                    fault = 4
                if fault != 0:
                    break
                if code == DECIMAL:
                    fault = _decimal(data, at, length, first, powers, numbers, number_at + place)
                    if fault != 0:
                        break
                else:
                    to = slots[slot, BYTE_AT] + sizes[slot]
                    is_ascii = copy_bytes(data, at, content, to, length)
                    if code == TEXT and not is_ascii and not is_utf8(data, at, at + length):
                        fault = 5
                        break
                    sizes[slot] += length
                    ends[slots[slot, END_AT] + place + 1] = sizes[slot]
                at += length
            elif code == SET:
                # A struct, or the end of an array or a map, whose items are counted in another slot.
                if first >= 0:
                    sizes[slot] = counts[first]
                    ends[slots[slot, END_AT] + place + 1] = sizes[slot]
            elif code in (DOUBLE, FLOAT):
                length = np.int64(8) if code == DOUBLE else np.int64(4)
                if length > end - at:
                    fault = 1
                    break
                bits = np.uint64(0)
                for i in range(length):
                    bits |= np.uint64(data[at + i]) << np.uint64(8 * i)
                numbers[number_at] = np.int64(bits)
                at += length
            elif code == BOOL:
                if at >= end:
                    fault = 1
                    break
                if data[at] > 1:
                    fault = 11
                    break
                numbers[number_at] = data[at]
                at += 1
            elif code in (FIXED, DECIMAL_FIXED):
                if first > end - at:
                    fault = 1
                    break
                if code == FIXED:
                    copy_bytes(data, at, content, slots[slot, BYTE_AT] + sizes[slot], first)
                    sizes[slot] += first
                else:
                    fault = _decimal(data, at, first, program[step - 1, 3], powers, numbers, number_at + place)
                    if fault != 0:
                        break
                at += first
            else:
                number, at, fault = _long(data, at, end)
                if fault != 0:
                    break
                if code in (INT, DATE, ENUM):
                    if number < -(2**31) or number >= 2**31:
                        fault = 3
                    elif code == ENUM and (number < 0 or number >= first):
                        fault = 6
                    elif code == DATE and (number < DATE_MIN or number > DATE_MAX):
                        fault = 9
                elif code == MILLIS:
                    if number < MS_MIN or number > MS_MAX:
                        fault = 9
                    number *= 1000
                elif code == MICROS:
                    if number < CALENDAR_US_MIN or number > CALENDAR_US_MAX:
                        fault = 9
                elif code == NANOS:
                    number //= 1000
                if fault != 0:
                    break
                numbers[number_at] = number
            valid[slots[slot, VALID_AT] + place] = 1
            counts[slot] = place + 1
        if fault == 0 and at != end:
            fault = 10
        faults[row] = fault
        if fault != 0:
            counts[:] = saved_counts
            sizes[:] = saved_sizes
