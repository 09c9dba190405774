"""Finding the end of a log without changing anything: for logs whose node is stopped.

Above the recovery point the log ends at the first batch with a bad CRC, as when it is opened (see `recovery`): what
follows is left over from a crash.
"""

from typing import NamedTuple

from chronik.storage.batches import is_intact, walk_headers
from chronik.storage.disk import Disk, read_file
from chronik.storage.epochs import UNDEFINED, LeaderEpochs
from chronik.storage.segment import segment_path
from chronik.storage.swap import CLEANER_NAME
from chronik.storage.synced_end import read_synced_end
from chronik.storage.syncing import EPOCHS_NAME
from chronik.wire.batch import BatchHeader

__all__ = ["LogSurvey", "survey_log"]


class LogSurvey(NamedTuple):
    """What a log's batches show; -1 for values that no batch has."""

    log_end_offset: int = 0
    last_epoch: int = UNDEFINED
    """The epoch of the last record, even if retention has removed it."""
    highest_producer_id: int = -1
    is_compacted: bool = False
    """Whether it was compacted at least once."""


def survey_log(disk: Disk, folder: str, recovery_point: int) -> LogSurvey:
    """Survey the log in `folder`. Reads all headers, and whole batches only above the recovery point. Blocks."""
    recovery_point = max(recovery_point, read_synced_end(disk, folder))
    names = disk.listdir(folder)
    bases = [int(name[:-4]) for name in names if name.endswith(".log") and name[:-4].isdigit()]
    # Compaction leaves gaps. Without it, a gap means a missing segment, and the log ends before it.
    is_compacted = CLEANER_NAME in names
    epochs = LeaderEpochs.decode(read_file(disk, f"{folder}/{EPOCHS_NAME}") or b"")
    last_epoch = UNDEFINED if epochs is None else epochs.latest
    survey = LogSurvey(bases[0] if bases else 0, last_epoch, is_compacted=is_compacted)
    for base in bases:
        if base < survey.log_end_offset or (base > survey.log_end_offset and not is_compacted):
            break
        file = disk.open(segment_path(folder, base))
        try:
            survey = survey._replace(log_end_offset=base)
            for at, header in walk_headers(file, 0, file.size()):
                is_durable = header.next_offset <= recovery_point
                if header.base_offset < survey.log_end_offset or not (
                    is_durable or is_intact(file.pread(at, header.size_bytes), header)
                ):
                    return survey
                survey = _after(survey, header)
        finally:
            file.close()
    return survey


def _after(survey: LogSurvey, header: BatchHeader) -> LogSurvey:
    return survey._replace(
        log_end_offset=header.next_offset,
        last_epoch=header.partition_leader_epoch,
        highest_producer_id=max(survey.highest_producer_id, header.producer_id),
    )
