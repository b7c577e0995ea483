# SPDX-License-Identifier: Apache-2.0
"""Multipart uploads: Create, UploadPart, Complete, Abort. Their listings are in listing.py."""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING

import checksums
import headers as request_headers
from errors import S3Error, xml_document
from http1 import Request, Response
from objects import (
    check_length,
    crc_of,
    etag_of,
    goog_hash,
    goog_headers,
    parse_document,
    receive_document,
    take_in,
)
from store import Bucket, Checksum, Object, Part, Upload, new_upload_id

if TYPE_CHECKING:
    from service import Service

PART_NUMBER_MAX = 10000  # S3's
MULTIPART_BYTES_MAX = 5 << 40  # S3's, of an object


def _checksum_of_upload(request: Request) -> tuple[str | None, str | None]:
    """(algorithm, type) that CreateMultipartUpload asks for."""
    algorithm = request.headers.get("x-amz-checksum-algorithm")
    kind = request.headers.get("x-amz-checksum-type")
    if algorithm is None:
        if kind is not None:
            raise S3Error(
                "InvalidRequest",
                "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm header.",
            )
        return None, None
    algorithm = algorithm.upper()
    if algorithm == "CRC64NVME":
        raise S3Error("NotImplemented", Header="x-amz-checksum-algorithm")
    if algorithm not in checksums.ALGORITHMS:
        raise S3Error(
            "InvalidRequest", "Checksum algorithm provided is unsupported. Please try again with another."
        )
    _, whole, composite = checksums.ALGORITHMS[algorithm]
    kind = kind.upper() if kind is not None else "COMPOSITE"
    if kind not in ("COMPOSITE", "FULL_OBJECT"):
        raise S3Error("InvalidRequest", "Value for x-amz-checksum-type header is invalid.")
    if not (whole if kind == "FULL_OBJECT" else composite):
        raise S3Error(
            "InvalidRequest",
            f"The {kind} checksum type cannot be used with the {algorithm.lower()} checksum algorithm.",
        )
    return algorithm, kind


async def create(service: Service, request: Request, bucket: Bucket) -> Response:
    kept = request_headers.object_headers(request)
    algorithm, kind = _checksum_of_upload(request) if service.use_checksums else (None, None)
    await receive_document(service, request, use_checksums=False)
    upload = bucket.begin(Upload(new_upload_id(), request.key, service.now(), kept, algorithm, kind))
    answer = {"Content-Type": "application/xml", **request_headers.encryption_of(kept)}
    if algorithm is not None:
        answer.update({"x-amz-checksum-algorithm": algorithm, "x-amz-checksum-type": str(kind)})
    children = [("Bucket", bucket.name), ("Key", request.key), ("UploadId", upload.upload_id)]
    return Response(headers=answer, body=xml_document("InitiateMultipartUploadResult", children))


def _type_mismatch(wanted: str | None, given: str | None) -> S3Error:
    return S3Error(
        "InvalidRequest",
        f"Checksum Type mismatch occurred, expected checksum Type: {(wanted or 'null').lower()}, actual checksum "
        f"Type: {(given or 'null').lower()}",
    )


async def upload_part(service: Service, request: Request, bucket: Bucket) -> Response:
    number = request.query.get("partNumber", "")
    if not number.isdigit() or not 1 <= int(number) <= PART_NUMBER_MAX:
        raise S3Error(
            "InvalidArgument",
            f"Part number must be an integer between 1 and {PART_NUMBER_MAX}, inclusive",
            ArgumentName="partNumber",
            ArgumentValue=number,
        )
    if "x-amz-copy-source" in request.headers:
        raise S3Error("NotImplemented", Header="x-amz-copy-source")
    request_headers.refuse_encryption(request)
    upload = bucket.upload(request.query["uploadId"], request.key)
    check_length(request)
    expected = request_headers.expected(request, request.payload, service.use_checksums)
    if service.use_checksums and expected.algorithm != upload.algorithm:
        raise _type_mismatch(upload.algorithm, expected.algorithm)
    intake = await take_in(service, request, expected)
    # Once more: it may have been aborted while the body arrived.
    upload = bucket.upload(request.query["uploadId"], request.key)
    crc = crc_of(intake, expected)
    part = Part(
        blob=intake.blob,
        size=intake.size,
        etag=etag_of(service, intake, crc, request_headers.etag_is_md5(upload.headers)),
        modified=service.now(),
        crc32c=crc,
        checksum=expected.checksum(),
        digest=expected.digest or b"",
    )
    upload.parts[int(number)] = part
    answer = {"ETag": f'"{part.etag}"', **request_headers.encryption_of(upload.headers)}
    answer.update(goog_hash(service, crc, intake.digest("MD5")))
    if part.checksum is not None:
        answer[request_headers.CHECKSUM + part.checksum.algorithm.lower()] = part.checksum.value
    return Response(headers=answer)


def _named_parts(root: ElementTree.Element) -> list[tuple[int, dict[str, str]]]:
    """(number, the other elements' texts) of each <Part>."""
    named = []
    for element in root:
        texts = {child.tag: (child.text or "").strip() for child in element}
        number = texts.pop("PartNumber", "")
        known = {"ETag", *(f"Checksum{name}" for name in (*checksums.ALGORITHMS, "CRC64NVME"))}
        if element.tag != "Part" or not number.isdigit() or "ETag" not in texts or set(texts) - known:
            raise S3Error("MalformedXML")
        named.append((int(number), texts))
    if not named or len(named) > PART_NUMBER_MAX:
        raise S3Error("MalformedXML")
    return named


def _chosen_parts(service: Service, upload: Upload, named: list[tuple[int, dict[str, str]]]) -> list[Part]:
    numbers = [number for number, _ in named]
    if any(second <= first for first, second in zip(numbers, numbers[1:])):
        raise S3Error("InvalidPartOrder", UploadId=upload.upload_id)
    chosen = []
    for index, (number, texts) in enumerate(named):
        part = upload.parts.get(number)
        etag = texts["ETag"].strip('"')
        if part is None or part.etag != etag:
            raise S3Error("InvalidPart", UploadId=upload.upload_id, PartNumber=number, ETag=etag)
        if upload.algorithm is not None and f"Checksum{upload.algorithm}" not in texts:
            raise S3Error(
                "InvalidRequest",
                f"The upload was created using a {upload.algorithm.lower()} checksum. The complete request must "
                f"include the checksum for each part. It was missing for part {number} in the request.",
            )
        for name, value in texts.items():
            if name == "ETag" or not service.use_checksums:
                continue
            if (
                part.checksum is None
                or name != f"Checksum{part.checksum.algorithm}"
                or part.checksum.value != value
            ):
                raise S3Error("InvalidPart", UploadId=upload.upload_id, PartNumber=number, ETag=etag)
        if part.size < service.part_min and index + 1 < len(named):
            raise S3Error(
                "EntityTooSmall",
                ProposedSize=part.size,
                MinSizeAllowed=service.part_min,
                PartNumber=number,
                ETag=etag,
            )
        chosen.append(part)
    if upload.kind == "COMPOSITE" and numbers != list(range(1, len(numbers) + 1)):
        raise S3Error(
            "InternalError", "With a composite checksum the parts must be numbered from 1 without a gap."
        )
    return chosen


def _whole_checksum(request: Request, upload: Upload, parts: list[Part]) -> Checksum | None:
    """The whole object's checksum, compared with that in Complete's headers."""
    kind = request.headers.get("x-amz-checksum-type")
    given = request_headers.checksum_header(request.headers)
    if kind is not None and kind.upper() != upload.kind:
        raise S3Error(
            "InvalidRequest",
            f"The checksum type {kind} does not match the upload's, {upload.kind or 'null'}.",
        )
    if given is not None and given[0] != upload.algorithm:
        raise _type_mismatch(upload.algorithm, given[0])
    if upload.algorithm is None or upload.kind is None:
        return None
    if upload.kind == "COMPOSITE":
        value = checksums.of_parts(upload.algorithm, [part.digest for part in parts])
    else:
        value = checksums.of_whole(upload.algorithm, [(part.digest, part.size) for part in parts])
    if given is not None:
        digest = given[1].rpartition("-")[0] if upload.kind == "COMPOSITE" else given[1]
        if checksums.decode(digest, checksums.ALGORITHMS[upload.algorithm][0]) is None:
            raise S3Error(
                "InvalidRequest",
                f"Value for x-amz-checksum-{upload.algorithm.lower()} header is invalid.",
            )
        if given[1] != value:
            raise request_headers.bad_digest(upload.algorithm)
    return Checksum(upload.algorithm, value, upload.kind)


def _crc_of_parts(parts: list[Part]) -> int | None:
    crc = 0
    for part in parts:
        if part.crc32c is None:
            return None
        crc = checksums.combine(crc, part.crc32c, part.size)
    return crc


async def complete(service: Service, request: Request, bucket: Bucket) -> Response:
    upload = bucket.upload(request.query["uploadId"], request.key)
    request_headers.refuse_encryption(request)
    body = await receive_document(service, request, use_checksums=False)
    upload = bucket.upload(upload.upload_id, request.key)
    named = _named_parts(parse_document(body, "CompleteMultipartUpload"))
    parts = _chosen_parts(service, upload, named)
    size = sum(part.size for part in parts)
    said = request.headers.get("x-amz-mp-object-size", str(size))
    if not said.isdigit() or int(said) != size:
        raise S3Error(
            "InvalidRequest",
            f"The provided 'x-amz-mp-object-size' header value {said} does not match what was computed: {size}.",
        )
    if size > MULTIPART_BYTES_MAX:
        raise S3Error("EntityTooLarge", ProposedSize=size, MaxSizeAllowed=MULTIPART_BYTES_MAX)
    checksum = _whole_checksum(request, upload, parts) if service.use_checksums else None
    request_headers.check_conditions(request, bucket.objects.get(request.key), service.conditional)
    error = request.faults.get("error_in_200")
    if error is not None and not error.get("effect"):
        return _error_in_200(service, request, error)
    etags = b"".join(bytes.fromhex(part.etag) for part in parts)
    made = Object(
        key=request.key,
        size=size,
        blobs=[part.blob for part in parts],
        etag=f"{hashlib.md5(etags, usedforsecurity=False).hexdigest()}-{len(parts)}",
        modified=service.now(),
        crc32c=_crc_of_parts(parts),
        checksum=checksum,
        headers=upload.headers,
        parts=parts,
        generation=service.store.next_generation(),
    )
    bucket.put(made)
    del bucket.uploads[upload.upload_id]
    if error is not None:
        return _error_in_200(service, request, error)
    children = [
        ("Location", f"http://{request.headers['host']}{request.raw_path}"),
        ("Bucket", bucket.name),
        ("Key", request.key),
        ("ETag", f'"{made.etag}"'),
    ]
    if checksum is not None:
        children += [(f"Checksum{checksum.algorithm}", checksum.value), ("ChecksumType", checksum.kind)]
    answer = {"Content-Type": "application/xml", **request_headers.encryption_of(made.headers)}
    answer.update(goog_headers(service, made))
    return Response(headers=answer, body=xml_document("CompleteMultipartUploadResult", children))


def _error_in_200(service: Service, request: Request, fault: dict) -> Response:
    """S3 begins its answer early, sends spaces while it works, and may then end it with an error."""
    body = service.error_body(request, S3Error(fault.get("code", "InternalError")))
    first, _, rest = body.partition(b"\n")
    spaces = [b" "] * int(fault.get("spaces", 0))
    return Response(headers={"Content-Type": "application/xml"}, chunks=[first + b"\n", *spaces, rest])


def abort(service: Service, request: Request, bucket: Bucket) -> Response:
    upload = bucket.upload(request.query["uploadId"], request.key)
    del bucket.uploads[upload.upload_id]
    return Response(204)
