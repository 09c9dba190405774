"""A file that stays open while any thread still uses it."""

from threading import Lock

from chronik.storage.disk import File

__all__ = ["SharedFile"]


class SharedFile:
    """An open file with a reference count: the last user closes it.

    The log releases files (retention, compaction, the limit on open files) while a thread may still read or sync them.
    Closing at once could leave that thread with a descriptor that another file reuses.
    """

    __slots__ = ("_lock", "_users", "file")

    def __init__(self, file: File) -> None:
        self.file = file
        self._users = 1
        self._lock = Lock()

    def acquire(self) -> "SharedFile":
        """Add a reference. The caller must know that another reference is still held."""
        with self._lock:
            self._users += 1
        return self

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self.file.close()
