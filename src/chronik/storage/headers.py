"""Reading only the headers of a range of batches."""

from collections.abc import Sequence
from typing import NamedTuple

from chronik.storage.segment import SegmentView
from chronik.wire.batch import BatchHeader

__all__ = ["HeadersJob", "HeadersResult"]


class HeadersResult(NamedTuple):
    """Headers in log order, and the offset to continue from; None if the range is complete."""

    headers: list[BatchHeader]
    next_offset: int | None


class HeadersJob:
    """Reads headers in a thread; touches only files, and only the first bytes of each batch. Call it once.

    `views` are consecutive segments, starting with the one that should hold `offset`. `behind_offset` is the base
    offset of the segment after them, or None.
    """

    def __init__(
        self,
        views: Sequence[SegmentView],
        behind_offset: int | None,
        offset: int,
        to_offset: int,
        upto_offset: int,
        headers_max: int,
    ) -> None:
        self._views = views
        self._behind_offset = behind_offset
        self._offset = offset
        self._to_offset = to_offset
        self._upto_offset = upto_offset
        self._headers_max = headers_max

    def __call__(self) -> HeadersResult:
        try:
            return self._walk()
        finally:
            for view in self._views:
                view.release()

    def _walk(self) -> HeadersResult:
        headers: list[BatchHeader] = []
        for view in self._views:
            for _, header in view.walk(view.position_near(self._offset)):
                if header.last_offset < self._offset:
                    continue
                if header.base_offset >= self._to_offset or header.last_offset >= self._upto_offset:
                    return HeadersResult(headers, None)
                if len(headers) == self._headers_max:
                    return HeadersResult(headers, header.base_offset)
                headers.append(header)
        behind = self._behind_offset
        return HeadersResult(headers, None if behind is None or behind >= self._to_offset else behind)
