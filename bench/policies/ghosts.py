"""Ghosts: which blocks were evicted, and in which order. Only hashes of their keys are kept."""

from __future__ import annotations

from array import array
from collections import deque

import xxhash

_WAYS = 16
"""Places in a bucket; a full bucket loses its oldest ghost."""
_LOAD = 8
"""Ghosts per bucket, on average."""
_CHUNK = 1024
_TRIM_AT_ONCE = 16
"""At most so many ghosts are dropped when one is added: a limit that falls by much is met a little later."""
_SLACK = 64


class Ghosts:
    """A queue of keys that stores only 64-bit hashes, about 45 bytes per ghost. O(1), growth included.

    A table of buckets grows by one bucket at a time. The new bucket takes its part of the ghosts of one older bucket
    (linear hashing, Litwin 1980), so the ghosts are never all moved at once. Their order is a queue of hashes; a ghost
    that was taken leaves its hash in the queue, so each ghost has a number to tell them apart.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hashes = array("Q", bytes(8 * _WAYS))
        self._numbers = array("Q", bytes(8 * _WAYS))
        self._mask = 0  # number of buckets at the last doubling, less one
        self._split = 0  # how many of those buckets have been split so far
        self._queue: deque[array[int]] = deque([array("Q")])
        self._gone = 0  # how many hashes of the queue's first chunk have been consumed
        self._oldest = self._next = 0  # ghost numbers

    def __len__(self) -> int:
        return self.count

    @property
    def size_bytes(self) -> int:
        """Memory used by the table and the queue."""
        return 16 * len(self._hashes) + 8 * sum(map(len, self._queue))

    def _bucket(self, digest: int) -> int:
        """The first place of the hash's bucket."""
        bucket = digest & self._mask
        if bucket < self._split:
            bucket = digest & (2 * self._mask + 1)
        return bucket * _WAYS

    def _find(self, digest: int, bucket: int) -> int:
        """The place of a hash in its bucket (0 looks for an empty place); -1 if it is not there."""
        if digest not in self._hashes[bucket : bucket + _WAYS]:  # the usual case, and quicker than an exception
            return -1
        return self._hashes.index(digest, bucket, bucket + _WAYS)

    def take(self, key: bytes) -> bool:
        """Remove a block's ghost; True if there was one."""
        if not self.count:
            return False
        digest = _digest(key)
        place = self._find(digest, self._bucket(digest))
        if place < 0:
            return False
        self._hashes[place] = 0
        self.count -= 1
        return True

    def add(self, key: bytes, limit: int) -> None:
        """The block was evicted: add it as the youngest ghost, and drop the oldest beyond `limit`."""
        if limit > 0:
            self._put(_digest(key))
        self.trim(limit)

    def trim(self, limit: int) -> None:
        """Drop the oldest ghosts, so that at most `limit` remain."""
        for _ in range(_TRIM_AT_ONCE):
            if self.count <= limit and self._next - self._oldest <= 2 * limit + _SLACK:
                break
            self._drop_oldest()

    def _put(self, digest: int) -> None:
        bucket = self._bucket(digest)
        place = self._find(digest, bucket)
        if place < 0:
            place = self._find(0, bucket)
            self.count += place >= 0
        if place < 0:
            place = min(range(bucket, bucket + _WAYS), key=self._numbers.__getitem__)
        self._hashes[place], self._numbers[place] = digest, self._next
        if len(self._queue[-1]) == _CHUNK:
            self._queue.append(array("Q"))
        self._queue[-1].append(digest)
        self._next += 1
        if self.count > _LOAD * (self._mask + 1 + self._split):
            self._grow()

    def _drop_oldest(self) -> None:
        if self._oldest == self._next:
            return
        digest, number = self._queue[0][self._gone], self._oldest
        self._oldest += 1
        self._gone += 1
        if self._gone == _CHUNK:
            self._queue.popleft()
            self._gone = 0
            if not self._queue:
                self._queue.append(array("Q"))
        place = self._find(digest, self._bucket(digest))
        if place >= 0 and self._numbers[place] == number:
            self._hashes[place] = 0
            self.count -= 1

    def _grow(self) -> None:
        """Add one bucket."""
        hashes, numbers = self._hashes, self._numbers
        to = len(hashes)
        bit, old = self._mask + 1, self._split * _WAYS
        hashes.frombytes(bytes(8 * _WAYS))
        numbers.frombytes(bytes(8 * _WAYS))
        for place in range(old, old + _WAYS):
            if hashes[place] & bit:
                hashes[to], numbers[to] = hashes[place], numbers[place]
                hashes[place] = 0
                to += 1
        self._split += 1
        if self._split > self._mask:
            self._mask, self._split = 2 * self._mask + 1, 0


def _digest(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key) or 1
