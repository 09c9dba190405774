"""A file that outlives its owner for as long as a thread still uses it."""

from threading import Lock

from chronik.storage.disk import File

__all__ = ["SharedFile"]


class SharedFile:
    """An open file with a count of its users: whoever leaves last closes it.

    The log lets go of files (retention, compaction, the bound on open files) while a read or a sync may run on them in
    a thread; closing at once would hand that thread a foreign descriptor.
    """

    __slots__ = ("_lock", "_users", "file")

    def __init__(self, file: File) -> None:
        self.file = file
        self._users = 1
        self._lock = Lock()

    def acquire(self) -> "SharedFile":
        """Take a share; only for who knows that another share is still held."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self.file.close()
