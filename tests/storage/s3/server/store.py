# SPDX-License-Identifier: Apache-2.0
"""Buckets, objects and unfinished uploads, in memory."""

from __future__ import annotations

import bisect
import itertools
import mmap
import secrets
from dataclasses import dataclass, field
from typing import Any

import checksums
from errors import S3Error

# Larger bodies are those that --discard, --no-md5-large and --no-verify-large mean. They get pages of their own.
LARGE_BYTES = 1 << 20


class Blob:
    """A body's memory. It counts against the store's limit.

    A large blob gives its memory back to the store, which uses it again. Who holds `view` or a slice of it must hold
    the blob too.
    """

    __slots__ = ("_store", "size", "view")

    def __init__(self, store: Store, size: int, keep: bool = False) -> None:
        self._store = store
        self.size = 0
        self.view: memoryview | None = None  # None: discarded
        if store.discard and size > LARGE_BYTES and not keep:
            return
        if store.used + size > store.limit:
            raise S3Error("InsufficientStorage", Limit=store.limit, Used=store.used, Wanted=size)
        self.view = store.take(size) if size > LARGE_BYTES else memoryview(bytearray(size))
        self.size = size
        store.used += size

    def __del__(self) -> None:
        self._store.used -= self.size
        if self.size > LARGE_BYTES and self.view is not None:
            self._store.give_back(self.view)


class Intake:
    """Receives one body into a blob, and computes its digests."""

    def __init__(
        self, store: Store, size: int, algorithms: set[str], scratch: memoryview, keep: bool
    ) -> None:
        """`scratch`: the connection's memory for bytes that are discarded. `keep`: discard nothing."""
        self.size = size
        self._at = 0
        self.blob = Blob(store, size, keep)
        self._memory = scratch if self.blob.view is None else self.blob.view
        wanted = {"CRC32C", "MD5"} | algorithms
        if size > LARGE_BYTES and store.verify_large == "nothing":
            wanted = set()
        elif size > LARGE_BYTES and store.verify_large == "crc":
            wanted -= {"MD5"} - algorithms
        elif size > LARGE_BYTES and not checksums.crc32c_is_fast():
            wanted -= {"CRC32C"} - algorithms  # nobody but /_control/state would use it
        self._digests = {name: checksums.new(name) for name in sorted(wanted)}

    def space(self, count: int) -> memoryview:
        begin = self._at if self.blob.view is not None else 0
        return self._memory[begin : begin + count]

    def filled(self, view: memoryview) -> None:
        self._at += len(view)
        for digest in self._digests.values():
            digest.update(view)

    def digest(self, algorithm: str) -> bytes | None:
        """None: not computed for a large body, because of an option."""
        made = self._digests.get(algorithm)
        return None if made is None else made.digest()


@dataclass
class Checksum:
    algorithm: str
    value: str  # as in S3's headers
    kind: str  # COMPOSITE or FULL_OBJECT


@dataclass
class Part:
    blob: Blob
    size: int
    etag: str  # without quotes
    modified: float
    crc32c: int | None
    checksum: Checksum | None
    digest: bytes = b""  # of that checksum


@dataclass
class Object:
    key: str
    size: int
    blobs: list[Blob]
    etag: str
    modified: float
    crc32c: int | None
    checksum: Checksum | None
    headers: dict[str, str]  # that GET returns: type, metadata, encryption, storage class
    md5: bytes | None = None
    parts: list[Part] = field(default_factory=list)  # of a multipart upload
    generation: int = 0

    def slices(self, begin: int, end: int) -> list[memoryview]:
        """The bytes of [begin, end), without a copy."""
        found, at = [], 0
        for blob, size in zip(self.blobs, self.sizes()):
            low, high = max(begin - at, 0), min(end - at, size)
            if low < high:
                if blob.view is None:
                    raise S3Error("NotImplemented", f"the bytes of {self.key} were discarded (--discard)")
                found.append(blob.view[low:high])
            at += size
        return found

    def sizes(self) -> list[int]:
        return [part.size for part in self.parts] if self.parts else [self.size]


@dataclass
class Upload:
    upload_id: str
    key: str
    initiated: float
    headers: dict[str, str]
    algorithm: str | None
    kind: str | None  # of its checksum: COMPOSITE or FULL_OBJECT
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass
class Bucket:
    name: str
    read_only: bool = False
    objects: dict[str, Object] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)  # sorted; code points sort as their UTF-8 does
    uploads: dict[str, Upload] = field(default_factory=dict)

    def put(self, made: Object) -> None:
        if made.key not in self.objects:
            bisect.insort(self.keys, made.key)
        self.objects[made.key] = made

    def remove(self, key: str) -> bool:
        if self.objects.pop(key, None) is None:
            return False
        del self.keys[bisect.bisect_left(self.keys, key)]
        return True

    def upload(self, upload_id: str, key: str) -> Upload:
        found = self.uploads.get(upload_id)
        if found is None or found.key != key:
            raise S3Error("NoSuchUpload", UploadId=upload_id)
        return found

    def begin(self, upload: Upload) -> Upload:
        self.uploads[upload.upload_id] = upload
        return upload


class Store:
    def __init__(self, limit: int, discard: bool, verify_large: str) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.limit = limit  # bytes of bodies
        self.used = 0
        self.discard = discard
        self.verify_large = verify_large  # "all", "crc": no MD5, "nothing"
        self._generation = 0
        self._spare: dict[int, list[memoryview]] = {}  # by size; parts mostly have one size
        self._spare_bytes = 0

    def take(self, size: int) -> memoryview:
        """Memory for a large body. The first touch of new pages costs more than receiving, so old ones go first."""
        if self._spare.get(size):
            self._spare_bytes -= size
            return self._spare[size].pop()
        if self.used + self._spare_bytes + size > self.limit:
            self._spare.clear()
            self._spare_bytes = 0
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapped)

    def give_back(self, view: memoryview) -> None:
        self._spare.setdefault(len(view), []).append(view)
        self._spare_bytes += len(view)

    def bucket(self, name: str) -> Bucket:
        found = self.buckets.get(name)
        if found is None:
            raise S3Error("NoSuchBucket", BucketName=name)
        return found

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def reset(self) -> None:
        for bucket in self.buckets.values():
            bucket.objects.clear()
            bucket.keys.clear()
            bucket.uploads.clear()


_uploads_begun = itertools.count(1)


def new_upload_id() -> str:
    """Ids sort in the order in which they were made. The pages of ListMultipartUploads need that."""
    return f"{next(_uploads_begun):012x}.{secrets.token_urlsafe(32)}"


def describe_headers(headers: dict[str, str]) -> dict[str, Any]:
    """For /_control/state."""
    prefix = "x-amz-meta-"
    metadata = {name[len(prefix) :]: value for name, value in headers.items() if name.startswith(prefix)}
    return {"metadata": metadata, "headers": {n: v for n, v in headers.items() if not n.startswith(prefix)}}
