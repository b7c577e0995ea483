# SPDX-License-Identifier: Apache-2.0
"""ListObjectsV2, ListParts, ListMultipartUploads."""

from __future__ import annotations

import base64
import bisect
import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

from errors import S3Error, xml_document
from http1 import Request, Response, iso_date
from store import Bucket, Checksum, Object

if TYPE_CHECKING:
    from service import Service

PAGE_MAX = 1000  # S3's, of every listing
AFTER_ALL = "\U0010ffff"  # sorts behind whatever follows a prefix
OWNER = [("ID", "75aa57f09aa0c8caeab4f8c24e99d10f8e7faeebf76c078efc7c6caea54ba06a")]
_token_key = secrets.token_bytes(16)

Position = tuple[str, bool]  # a key, or (with True) a common prefix


def _page_size(request: Request, name: str) -> int:
    text = request.query.get(name, str(PAGE_MAX))
    if not text.isdigit() or int(text) > 2**31 - 1:
        raise S3Error(
            "InvalidArgument", f"Provided {name} not an integer or within integer range",
            ArgumentName=name, ArgumentValue=text,
        )  # fmt: skip
    return min(int(text), PAGE_MAX)


def _encoder(request: Request) -> Callable[[str], str]:
    encoding = request.query.get("encoding-type")
    if encoding not in (None, "url"):
        raise S3Error(
            "InvalidArgument", "Invalid Encoding Method specified in Request",
            ArgumentName="encoding-type", ArgumentValue=encoding,
        )  # fmt: skip
    return (lambda text: quote_plus(text, safe="/*")) if encoding else lambda text: text


def _bad_token() -> S3Error:
    return S3Error(
        "InvalidArgument", "The continuation token provided is incorrect", ArgumentName="continuation-token"
    )


def _seal(scope: str, body: bytes) -> bytes:
    return hmac.digest(_token_key, scope.encode("utf-8", "replace") + b"\0" + body, hashlib.sha256)[:12]


def _make_token(scope: str, after: Position) -> str:
    """Opaque. It is valid only for the listing that it continues."""
    body = ("/" if after[1] else ".").encode() + after[0].encode("utf-8", "surrogateescape")
    return base64.b64encode(_seal(scope, body) + body).decode()


def _read_token(scope: str, token: str) -> Position:
    try:
        raw = base64.b64decode(token, validate=True)
    except ValueError:
        raise _bad_token() from None
    body = raw[12:]
    if not body or not hmac.compare_digest(_seal(scope, body), raw[:12]):
        raise _bad_token()
    return body[1:].decode("utf-8", "surrogateescape"), body[:1] == b"/"


def _walk(
    keys: list[str], prefix: str, delimiter: str, after: Position, limit: int
) -> tuple[list[Position], bool]:
    """At most `limit` keys and common prefixes after `after`, and whether more follow."""
    found: list[Position] = []
    at = bisect.bisect_left(keys, prefix)
    if after[0]:
        at = max(at, bisect.bisect_right(keys, after[0] + AFTER_ALL if after[1] else after[0]))
    while at < len(keys) and keys[at].startswith(prefix):
        if len(found) == limit:
            return found, True
        cut = keys[at].find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            found.append((keys[at], False))
            at += 1
        else:
            folder = keys[at][: cut + len(delimiter)]
            found.append((folder, True))
            at = bisect.bisect_right(keys, folder + AFTER_ALL)
    return found, False


def _checksum_elements(checksum: Checksum | None) -> list[tuple[str, Any]]:
    if checksum is None:
        return []
    return [("ChecksumAlgorithm", checksum.algorithm), ("ChecksumType", checksum.kind)]


def _object_element(found: Object, encode: Callable[[str], str]) -> tuple[str, list]:
    children = [
        ("Key", encode(found.key)),
        ("LastModified", iso_date(found.modified)),
        ("ETag", f'"{found.etag}"'),
        *_checksum_elements(found.checksum),
        ("Size", found.size),
        ("StorageClass", found.headers.get("x-amz-storage-class", "STANDARD")),
    ]
    return ("Contents", children)


class _Odd:
    """The "listing" fault's changes to a page."""

    def __init__(self, request: Request, first_page: bool) -> None:
        fault = request.faults.get("listing")
        self._mode = fault["mode"] if fault is not None else ""
        self._empty = self._mode == "empty" and first_page

    def limit(self, limit: int) -> int:
        return 0 if self._empty else 1 if self._mode == "short" else limit

    def truncated(self, truncated: bool) -> bool:
        return truncated or self._empty or self._mode in ("same_token", "no_token")

    def entries(self, entries: list) -> list:
        return [entry for entry in entries for _ in range(2)] if self._mode == "duplicate" else entries

    def next(self, following: str | None, own: str | None) -> str | None:
        """`own`: the token of this page's request."""
        if self._mode == "no_token":
            return None
        return own if self._mode == "same_token" and own else following


def list_objects(service: Service, request: Request, bucket: Bucket) -> Response:
    query = request.query
    if query.get("list-type") != "2":
        raise S3Error("NotImplemented", "Only ListObjectsV2 is implemented: list-type=2.")
    encode = _encoder(request)
    limit = _page_size(request, "max-keys")
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    token, start_after = query.get("continuation-token"), query.get("start-after", "")
    scope = f"{bucket.name}\0{prefix}\0{delimiter}"
    after = _read_token(scope, token) if token is not None else (start_after, False)
    odd = _Odd(request, token is None)
    found, truncated = _walk(bucket.keys, prefix, delimiter, after, odd.limit(limit))
    truncated = odd.truncated(truncated and limit > 0)
    following = _make_token(scope, found[-1] if found else after) if truncated else None
    contents = [_object_element(bucket.objects[name], encode) for name, folder in found if not folder]
    folders = [("CommonPrefixes", [("Prefix", encode(name))]) for name, folder in found if folder]
    contents, folders = odd.entries(contents), odd.entries(folders)
    children = [
        ("Name", bucket.name),
        ("Prefix", encode(prefix)),
        ("Delimiter", encode(delimiter) if delimiter else None),
        ("StartAfter", encode(start_after) if start_after else None),
        ("ContinuationToken", token),
        ("NextContinuationToken", odd.next(following, token) if truncated else None),
        ("KeyCount", len(contents) + len(folders)),
        ("MaxKeys", limit),
        ("EncodingType", query.get("encoding-type")),
        ("IsTruncated", truncated),
        *contents,
        *folders,
    ]
    return Response(
        headers={"Content-Type": "application/xml"}, body=xml_document("ListBucketResult", children)
    )


def list_parts(service: Service, request: Request, bucket: Bucket) -> Response:
    upload = bucket.upload(request.query["uploadId"], request.key)
    limit = _page_size(request, "max-parts")
    marker = request.query.get("part-number-marker", "0")
    if not marker.isdigit():
        raise S3Error("InvalidArgument", ArgumentName="part-number-marker", ArgumentValue=marker)
    odd = _Odd(request, marker == "0")
    numbers = [number for number in sorted(upload.parts) if number > int(marker)]
    shown = numbers[: odd.limit(limit)]
    truncated = odd.truncated(len(shown) < len(numbers) and limit > 0)
    following = str(shown[-1]) if shown else marker
    entries = []
    for number in shown:
        part = upload.parts[number]
        children = [
            ("PartNumber", number),
            ("LastModified", iso_date(part.modified)),
            ("ETag", f'"{part.etag}"'),
        ]
        if part.checksum is not None:
            children.append((f"Checksum{part.checksum.algorithm}", part.checksum.value))
        entries.append(("Part", [*children, ("Size", part.size)]))
    children = [
        ("Bucket", bucket.name),
        ("Key", _encoder(request)(upload.key)),
        ("UploadId", upload.upload_id),
        ("Initiator", OWNER),
        ("Owner", OWNER),
        ("StorageClass", upload.headers.get("x-amz-storage-class", "STANDARD")),
        ("ChecksumAlgorithm", upload.algorithm),
        ("ChecksumType", upload.kind),
        ("PartNumberMarker", marker),
        ("NextPartNumberMarker", odd.next(following, marker) if shown or truncated else None),
        ("MaxParts", limit),
        ("IsTruncated", truncated),
        *odd.entries(entries),
    ]
    return Response(
        headers={"Content-Type": "application/xml"}, body=xml_document("ListPartsResult", children)
    )


def list_uploads(service: Service, request: Request, bucket: Bucket) -> Response:
    query = request.query
    encode = _encoder(request)
    limit = _page_size(request, "max-uploads")
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    key_marker, id_marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
    uploads = sorted(bucket.uploads.values(), key=lambda u: (u.key, u.upload_id))
    entries: list[tuple[str, Any]] = []  # (key or common prefix, its upload or None)
    for upload in uploads:
        folder = None
        if not upload.key.startswith(prefix):
            continue
        if delimiter and (cut := upload.key.find(delimiter, len(prefix))) >= 0:
            folder = upload.key[: cut + len(delimiter)]
        if key_marker and id_marker:
            if (upload.key, upload.upload_id) <= (key_marker, id_marker):
                continue
        elif key_marker and (upload.key <= key_marker or (folder is not None and folder <= key_marker)):
            continue
        if folder is None:
            entries.append((upload.key, upload))
        elif not entries or entries[-1] != (folder, None):
            entries.append((folder, None))
    odd = _Odd(request, not key_marker)
    shown = entries[: odd.limit(limit)]
    truncated = odd.truncated(len(shown) < len(entries) and limit > 0)
    last_key, last = shown[-1] if shown else (key_marker, None)
    elements = []
    for key, upload in shown:
        if upload is None:
            continue
        children = [
            ("Key", encode(key)),
            ("UploadId", upload.upload_id),
            ("Initiator", OWNER),
            ("Owner", OWNER),
        ]
        children += [("StorageClass", upload.headers.get("x-amz-storage-class", "STANDARD"))]
        children += [("ChecksumAlgorithm", upload.algorithm), ("ChecksumType", upload.kind)]
        elements.append(("Upload", [*children, ("Initiated", iso_date(upload.initiated))]))
    folders = [("CommonPrefixes", [("Prefix", encode(key))]) for key, upload in shown if upload is None]
    next_key = odd.next(last_key, key_marker) if truncated else None
    next_id = odd.next(last.upload_id if last is not None else "", id_marker) if truncated else None
    children = [
        ("Bucket", bucket.name),
        ("KeyMarker", encode(key_marker)),
        ("UploadIdMarker", id_marker),
        ("NextKeyMarker", encode(next_key) if next_key is not None else None),
        ("NextUploadIdMarker", next_id),
        ("Prefix", encode(prefix)),
        ("Delimiter", encode(delimiter) if delimiter else None),
        ("MaxUploads", limit),
        ("EncodingType", query.get("encoding-type")),
        ("IsTruncated", truncated),
        *odd.entries(elements),
        *odd.entries(folders),
    ]
    return Response(
        headers={"Content-Type": "application/xml"}, body=xml_document("ListMultipartUploadsResult", children)
    )
