# SPDX-License-Identifier: Apache-2.0
"""Operations on whole objects: PutObject, GetObject, HeadObject, DeleteObject, DeleteObjects."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING

import checksums
import headers as request_headers
from errors import S3Error, xml_document
from http1 import Request, Response, http_date
from store import Bucket, Intake, Object

if TYPE_CHECKING:
    from service import Service

OBJECT_BYTES_MAX = 5 << 30  # S3's, of one PUT and of one part
DOCUMENT_BYTES_MAX = 4 << 20  # of a request's XML; 10,000 parts with checksums are 2 MB
DELETE_KEYS_MAX = 1000  # S3's, of one DeleteObjects


def check_length(request: Request) -> int:
    """Checks the length before the body is received, which fails where there is none."""
    size = request.content_length or 0
    if size > OBJECT_BYTES_MAX:
        raise S3Error("EntityTooLarge", ProposedSize=size, MaxSizeAllowed=OBJECT_BYTES_MAX)
    return size


async def take_in(
    service: Service, request: Request, expected: request_headers.Expected, keep: bool = False
) -> Intake:
    """Receives the body and checks it against the request's headers. `keep`: also with --discard."""
    scratch = request.connection.scratch()
    intake = Intake(service.store, check_length(request), expected.algorithms(), scratch, keep)
    await request.receive(intake.space, intake.filled)
    expected.check(intake)
    return intake


def crc_of(intake: Intake, expected: request_headers.Expected) -> int | None:
    digest = intake.digest("CRC32C")
    if digest is None and expected.algorithm == "CRC32C":
        digest = expected.digest  # not verified, by option
    return None if digest is None else int.from_bytes(digest, "big")


def etag_of(service: Service, intake: Intake, crc: int | None, md5_wanted: bool) -> str:
    md5 = intake.digest("MD5")
    if md5 is not None and md5_wanted:
        return md5.hex()
    # As long as an MD5. The same bytes have the same one, where they were looked at.
    other = checksums.new("SHA256")
    other.update(b"%d %d" % (intake.size, service.store.next_generation() if crc is None else crc))
    return other.digest().hex()[:32]


async def put_object(service: Service, request: Request, bucket: Bucket) -> Response:
    kept = request_headers.object_headers(request)
    expected = request_headers.expected(request, request.payload, service.use_checksums)
    request_headers.check_conditions(request, bucket.objects.get(request.key), service.conditional)
    intake = await take_in(service, request, expected)
    # Once more: another client may have put it while the body arrived.
    request_headers.check_conditions(request, bucket.objects.get(request.key), service.conditional)
    crc = crc_of(intake, expected)
    made = Object(
        key=request.key,
        size=intake.size,
        blobs=[intake.blob],
        etag=etag_of(service, intake, crc, request_headers.etag_is_md5(kept)),
        modified=service.now(),
        crc32c=crc,
        checksum=expected.checksum(),
        headers=kept,
        md5=intake.digest("MD5"),
        generation=service.store.next_generation(),
    )
    bucket.put(made)
    answer = {"ETag": f'"{made.etag}"', **request_headers.encryption_of(kept)}
    answer.update(request_headers.checksum_headers(made.checksum))
    answer.update(goog_headers(service, made))
    return Response(headers=answer)


def goog_hash(service: Service, crc: int | None, md5: bytes | None) -> dict[str, str]:
    """Google's x-goog-hash, with --gcs."""
    hashes = []
    if crc is not None:
        hashes.append("crc32c=" + checksums.encode(crc.to_bytes(4, "big")))
    if md5 is not None:
        hashes.append("md5=" + checksums.encode(md5))
    return {"x-goog-hash": ",".join(hashes)} if hashes and service.gcs else {}


def goog_headers(service: Service, found: Object) -> dict[str, str]:
    """Google's own headers, with --gcs."""
    if not service.gcs:
        return {}
    answer = {"x-goog-generation": str(found.generation), "x-goog-stored-content-length": str(found.size)}
    return {**answer, **goog_hash(service, found.crc32c, found.md5)}


def _part(request: Request, found: Object) -> tuple[int, int] | None:
    """[begin, end) of ?partNumber=N."""
    text = request.query.get("partNumber")
    if text is None:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 10000:
        raise S3Error("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    sizes = found.sizes()
    if int(text) > len(sizes):
        raise S3Error("InvalidRange", "The requested partnumber is not satisfiable", PartNumberRequested=text)
    begin = sum(sizes[: int(text) - 1])
    return begin, begin + sizes[int(text) - 1]


def _range(request: Request, size: int) -> tuple[int, int] | None:
    """[begin, end) of the Range header. A malformed one is ignored, as the RFC says."""
    header = request.headers.get("range", "")
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.replace(" ", ""))
    if match is None or match.group() == "bytes=-":
        return None
    first, last = match.groups()
    if first and last and int(first) > int(last):
        return None
    begin, end = (int(first), int(last) + 1 if last else size) if first else (max(size - int(last), 0), size)
    if begin >= size or (not first and int(last) == 0):
        raise S3Error("InvalidRange", RangeRequested=header, ActualObjectSize=size)
    return begin, min(end, size)


def get_object(service: Service, request: Request, bucket: Bucket) -> Response:
    """HEAD too: send_response() leaves the body out."""
    request_headers.refuse_encryption(request)
    found = bucket.objects.get(request.key)
    if found is None:
        raise S3Error("NoSuchKey", Key=request.key)
    if "if-match" in request.headers and request.headers["if-match"].strip('"') not in (found.etag, "*"):
        raise S3Error("PreconditionFailed", Condition="If-Match")
    answer = {
        "ETag": f'"{found.etag}"',
        "Last-Modified": http_date(found.modified),
        "Accept-Ranges": "bytes",
        **found.headers,
        **goog_headers(service, found),
    }
    if request.headers.get("if-none-match", "").strip('"') in (found.etag, "*"):
        return Response(304, answer)
    part = _part(request, found)
    span = part if part is not None else _range(request, found.size)
    if part is not None and found.parts:
        answer["x-amz-mp-parts-count"] = str(len(found.parts))
    whole = span is None or (part is not None and not found.parts)
    mode = request.headers.get("x-amz-checksum-mode")
    if mode is not None and mode.upper() != "ENABLED":
        raise S3Error("InvalidArgument", "x-amz-checksum-mode must be ENABLED", ArgumentValue=mode)
    if mode is not None and whole and service.use_checksums:
        answer.update(request_headers.checksum_headers(found.checksum))
    begin, end = span if span is not None else (0, found.size)
    status = 200
    if span is not None:
        answer["Content-Range"] = f"bytes {begin}-{end - 1}/{found.size}"
        status = 206
    if request.method == "HEAD":
        answer["Content-Length"] = str(end - begin)
        return Response(status, answer)
    return Response(status, answer, segments=found.slices(begin, end), owner=found)


def delete_object(service: Service, request: Request, bucket: Bucket) -> Response:
    found = bucket.objects.get(request.key)
    if {"if-match", "x-goog-if-generation-match"} & set(request.headers) and found is not None:
        request_headers.check_conditions(request, found, service.conditional)
    bucket.remove(request.key)
    return Response(204)


def parse_document(body: bytes, name: str) -> ElementTree.Element:
    """A request's XML, its elements without their namespace."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        raise S3Error("MalformedXML") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag != name:
        raise S3Error("MalformedXML")
    return root


async def receive_document(
    service: Service, request: Request, use_checksums: bool, digest_needed: bool = False
) -> bytes:
    """A small body, checked. `use_checksums` false: x-amz-checksum-* is not of this body."""
    if (request.content_length or 0) > DOCUMENT_BYTES_MAX:
        raise S3Error("MalformedXML")
    expected = request_headers.expected(request, request.payload, use_checksums)
    if digest_needed and expected.md5 is None and expected.algorithm is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: Content-MD5")
    intake = await take_in(service, request, expected, keep=True)
    assert intake.blob.view is not None
    return bytes(intake.blob.view)


async def delete_objects(service: Service, request: Request, bucket: Bucket) -> Response:
    root = parse_document(await receive_document(service, request, service.use_checksums, True), "Delete")
    keys = [element.findtext("Key") for element in root.findall("Object")]
    if not keys or len(keys) > DELETE_KEYS_MAX or any(not key for key in keys):
        raise S3Error("MalformedXML")
    if {element.tag for element in root} - {"Object", "Quiet"}:
        raise S3Error("MalformedXML")
    quiet = root.findtext("Quiet", "false").strip() == "true"
    results: list = []
    for key in keys:
        if bucket.read_only:
            results.append(("Error", [("Key", key), ("Code", "AccessDenied"), ("Message", "Access Denied")]))
            continue
        bucket.remove(key)
        if not quiet:
            results.append(("Deleted", [("Key", key)]))
    return Response(headers={"Content-Type": "application/xml"}, body=xml_document("DeleteResult", results))
