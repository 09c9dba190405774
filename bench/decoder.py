"""The speed of the pipeline's decoder: record batches in memory into Arrow, on one core, without Spark or network.

    .venv/bin/python bench/decoder.py

Seconds are CPU seconds of this process, so that other load on the machine does not count. The best round is reported.
"""

from __future__ import annotations

import time

from chronik.pipeline.source.columns import Chunk
from chronik.pipeline.source.decoder import ArrowDecoder, PythonChunk
from chronik.pipeline.source.numba_chunk import NumbaChunk
from chronik.pipeline.source.ranges import RecordRange
from chronik.wire.batch import encode_batch
from chronik.wire.compression import CODECS
from chronik.wire.records import NewRecord

ROUNDS = 8
BATCH_BYTES = (1_000_000, 16_000)
TOTAL_BYTES = 20_000_000


def measure(raw: bytes, count: int, chunk: type[Chunk]) -> float:
    """Return the seconds of the best round."""
    best_s = float("inf")
    for _ in range(ROUNDS if chunk is NumbaChunk else 1):
        decoder = ArrowDecoder(RecordRange("bench", 0, 0, count), chunk=chunk)
        started_s = time.process_time()
        rows = sum(made.num_rows for made in (*decoder.feed(memoryview(raw)), *decoder.finish()))
        best_s = min(best_s, time.process_time() - started_s)
        assert rows == count
    return best_s


def main() -> None:
    started_s = time.process_time()
    measure(encode_batch([(b"k", b"v", (), 0)]), 1, NumbaChunk)
    print(f"first batch, compiling or loading the compiled loop included: {time.process_time() - started_s:.2f} s")
    for size_bytes in (100, 1000):
        count = TOTAL_BYTES // size_bytes
        half = size_bytes // 2
        records: list[NewRecord] = [
            (b"%d" % i, (b"%d" % (i * 2654435761)).rjust(half, b"#") + b"." * half, (), 1_700_000_000_000 + i)
            for i in range(count)
        ]
        for batch_bytes in BATCH_BYTES:
            per_batch = batch_bytes // size_bytes
            for codec, name in enumerate(CODECS):
                if codec and batch_bytes != BATCH_BYTES[0]:
                    continue
                raw = b"".join(
                    encode_batch(records[at : at + per_batch], codec=codec, base_offset=at)
                    for at in range(0, count, per_batch)
                )
                for chunk in (NumbaChunk, PythonChunk) if not codec else (NumbaChunk,):
                    seconds = measure(raw, count, chunk)
                    print(
                        f"{size_bytes:5} B, batches of {batch_bytes // 1000} KB, {name:6} {chunk.__name__:13} "
                        f"{count / seconds / 1e6:6.2f} M records/s {count * size_bytes / seconds / 1e6:7.0f} MB/s"
                    )


if __name__ == "__main__":
    main()
