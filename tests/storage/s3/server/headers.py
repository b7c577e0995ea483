# SPDX-License-Identifier: Apache-2.0
"""Checks the headers of requests with data: checksums, encryption, metadata, conditions."""

from __future__ import annotations

from dataclasses import dataclass

import checksums
from errors import S3Error
from http1 import Request
from signature import UNSIGNED
from store import Checksum, Intake, Object

METADATA_BYTES_MAX = 2048  # S3's, of names and values
STORAGE_CLASSES = {
    "STANDARD", "REDUCED_REDUNDANCY", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER", "DEEP_ARCHIVE",
    "GLACIER_IR", "EXPRESS_ONEZONE",
}  # fmt: skip
KEPT = {
    "content-type",
    "content-encoding",
    "content-disposition",
    "content-language",
    "cache-control",
    "expires",
}
SSE = "x-amz-server-side-encryption"
SSE_KEY = SSE + "-aws-kms-key-id"
SSE_BUCKET_KEY = SSE + "-bucket-key-enabled"
SSE_CONTEXT = SSE + "-context"
CHECKSUM = "x-amz-checksum-"


def _argument(message: str, name: str, value: str) -> S3Error:
    return S3Error("InvalidArgument", message, ArgumentName=name, ArgumentValue=value)


def object_headers(request: Request) -> dict[str, str]:
    """The headers that are kept with the object: of PutObject and CreateMultipartUpload."""
    headers = request.headers
    kept = {name: value for name, value in headers.items() if name in KEPT or name.startswith("x-amz-meta-")}
    kept.setdefault("content-type", "binary/octet-stream")
    kept.update(_encryption(headers))
    metadata = sum(
        len(name) - len("x-amz-meta-") + len(value.encode("utf-8", "surrogateescape"))
        for name, value in kept.items()
        if name.startswith("x-amz-meta-")
    )
    if metadata > METADATA_BYTES_MAX:
        raise S3Error("MetadataTooLarge", Size=metadata, MaxSizeAllowed=METADATA_BYTES_MAX)
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class not in STORAGE_CLASSES:
        raise S3Error("InvalidStorageClass", StorageClassRequested=storage_class)
    if storage_class != "STANDARD":
        kept["x-amz-storage-class"] = storage_class
    for name in ("x-amz-acl", "x-amz-tagging", "x-amz-copy-source", "x-amz-website-redirect-location"):
        if name in headers:
            raise S3Error("NotImplemented", Header=name)
    return kept


def _encryption(headers: dict[str, str]) -> dict[str, str]:
    if any(name.startswith(SSE + "-customer") for name in headers):
        raise S3Error("NotImplemented", Header=SSE + "-customer-algorithm")
    method = headers.get(SSE)
    if method not in (None, "AES256", "aws:kms", "aws:kms:dsse"):
        raise _argument("The encryption method specified is not supported", SSE, str(method))
    kms = method in ("aws:kms", "aws:kms:dsse")
    for name in (SSE_KEY, SSE_CONTEXT):
        if name in headers and not kms:
            raise _argument(f"{name} is only for {SSE}: aws:kms", name, headers[name])
    if SSE_CONTEXT in headers and checksums.decode_any(headers[SSE_CONTEXT]) is None:
        raise _argument("The encryption context is not base64", SSE_CONTEXT, headers[SSE_CONTEXT])
    if headers.get(SSE_BUCKET_KEY, "true") not in ("true", "false"):
        raise _argument("must be true or false", SSE_BUCKET_KEY, headers[SSE_BUCKET_KEY])
    return {name: headers[name] for name in (SSE, SSE_KEY, SSE_BUCKET_KEY) if name in headers}


def refuse_encryption(request: Request) -> None:
    """S3 accepts encryption headers only in the request that begins an object."""
    for name in (SSE, SSE_KEY, SSE_BUCKET_KEY, SSE_CONTEXT):
        if name in request.headers:
            raise _argument(
                f"{name} header is not supported for this operation.", name, request.headers[name]
            )


def encryption_of(kept: dict[str, str]) -> dict[str, str]:
    return {name: kept[name] for name in (SSE, SSE_KEY, SSE_BUCKET_KEY) if name in kept}


def etag_is_md5(kept: dict[str, str]) -> bool:
    """With KMS keys it is not, says S3: a client must not rely on it."""
    return not kept.get(SSE, "").startswith("aws:kms")


@dataclass
class Expected:
    """The checksums that the request states for its body."""

    payload: str  # UNSIGNED-PAYLOAD, or its SHA-256 in hexadecimal
    md5: bytes | None
    algorithm: str | None  # of x-amz-checksum-…
    digest: bytes | None
    value: str | None
    goog: dict[str, bytes]

    def algorithms(self) -> set[str]:
        wanted = {self.algorithm} if self.algorithm else set()
        if self.payload != UNSIGNED:
            wanted.add("SHA256")
        if self.md5 is not None:
            wanted.add("MD5")
        return wanted | set(self.goog)

    def check(self, intake: Intake) -> None:
        """Compares the body that arrived with all of them."""
        computed = intake.digest("SHA256")
        if self.payload != UNSIGNED and computed is not None and computed.hex() != self.payload:
            raise S3Error(
                "XAmzContentSHA256Mismatch",
                ClientComputedContentSHA256=self.payload,
                S3ComputedContentSHA256=computed.hex(),
            )
        computed = intake.digest("MD5")
        if self.md5 is not None and computed is not None and computed != self.md5:
            raise S3Error(
                "BadDigest",
                ExpectedDigest=checksums.encode(self.md5),
                CalculatedDigest=checksums.encode(computed),
            )
        if self.algorithm is not None:
            computed = intake.digest(self.algorithm)
            if computed is not None and computed != self.digest:
                raise bad_digest(self.algorithm)
        for name, digest in self.goog.items():
            computed = intake.digest(name)
            if computed is not None and computed != digest:
                raise S3Error("BadDigest", f"The {name} in x-goog-hash did not match what we received.")

    def checksum(self) -> Checksum | None:
        return Checksum(self.algorithm, self.value or "", "FULL_OBJECT") if self.algorithm else None


def bad_digest(algorithm: str) -> S3Error:
    return S3Error("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")


def checksum_header(headers: dict[str, str]) -> tuple[str, str] | None:
    """(algorithm, value) of the one x-amz-checksum-… header of a body."""
    found = [
        (name[len(CHECKSUM) :].upper(), value)
        for name, value in headers.items()
        if name.startswith(CHECKSUM) and name[len(CHECKSUM) :] not in ("type", "algorithm", "mode")
    ]
    if len(found) > 1:
        raise S3Error(
            "InvalidRequest",
            "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed.",
        )
    if found and found[0][0] not in checksums.ALGORITHMS:
        raise S3Error("NotImplemented", Header=CHECKSUM + found[0][0].lower())
    return found[0] if found else None


def expected(request: Request, payload: str, use_checksums: bool) -> Expected:
    """`use_checksums` false: x-amz-checksum-* is ignored."""
    headers = request.headers
    md5 = None
    if "content-md5" in headers:
        md5 = checksums.decode(headers["content-md5"], 16)
        if md5 is None:
            raise S3Error("InvalidDigest", Content_MD5=headers["content-md5"])
    goog = _goog_hash(headers.get("x-goog-hash"))
    if not use_checksums:
        return Expected(payload, md5, None, None, None, goog)
    if "x-amz-trailer" in headers:
        raise S3Error("NotImplemented", Header="x-amz-trailer")
    named = headers.get("x-amz-sdk-checksum-algorithm")
    found = checksum_header(headers)
    if named is not None and named.upper() not in {*checksums.ALGORITHMS, "CRC64NVME"}:
        raise S3Error("InvalidRequest", "Value for x-amz-sdk-checksum-algorithm header is invalid.")
    if named is not None and found is None:
        raise S3Error(
            "InvalidRequest",
            "x-amz-sdk-checksum-algorithm specified, but no corresponding x-amz-checksum-* or x-amz-trailer headers "
            "were found.",
        )
    if found is None:
        return Expected(payload, md5, None, None, None, goog)
    algorithm, value = found
    if named is not None and named.upper() != algorithm:
        raise S3Error("InvalidRequest", "Value for x-amz-sdk-checksum-algorithm header is invalid.")
    digest = checksums.decode(value, checksums.ALGORITHMS[algorithm][0])
    if digest is None:
        raise S3Error("InvalidRequest", f"Value for {CHECKSUM}{algorithm.lower()} header is invalid.")
    return Expected(payload, md5, algorithm, digest, value, goog)


def _goog_hash(header: str | None) -> dict[str, bytes]:
    """Google's: "crc32c=…,md5=…", base64."""
    found: dict[str, bytes] = {}
    for item in filter(None, (header or "").split(",")):
        name, _, value = item.strip().partition("=")
        digest = checksums.decode(value, {"crc32c": 4, "md5": 16}.get(name, 0))
        if not digest:
            raise S3Error("InvalidArgument", f"Value for x-goog-hash header is invalid: {item}")
        found[name.upper()] = digest
    return found


def checksum_headers(checksum: Checksum | None) -> dict[str, str]:
    if checksum is None:
        return {}
    return {CHECKSUM + checksum.algorithm.lower(): checksum.value, CHECKSUM + "type": checksum.kind}


def check_conditions(request: Request, present: Object | None, conditional: bool) -> None:
    """A write's If-None-Match, If-Match and x-goog-if-generation-match."""
    headers = request.headers
    for name in ("if-none-match", "if-match"):
        if name in headers and not conditional:
            raise S3Error(
                "NotImplemented", Header={"if-none-match": "If-None-Match", "if-match": "If-Match"}[name]
            )
    if "if-none-match" in headers:
        if headers["if-none-match"] != "*":
            raise S3Error("NotImplemented", Header="If-None-Match")
        if present is not None:
            raise S3Error("PreconditionFailed", Condition="If-None-Match")
    if "if-match" in headers:
        if present is None:
            raise S3Error("NoSuchKey", Key=request.key)
        if headers["if-match"].strip('"') != present.etag:
            raise S3Error("PreconditionFailed", Condition="If-Match")
    generation = headers.get("x-goog-if-generation-match")
    if generation is not None:
        if not generation.isdigit():
            raise _argument("Invalid generation", "x-goog-if-generation-match", generation)
        if int(generation) != (present.generation if present is not None else 0):
            raise S3Error("PreconditionFailed", Condition="x-goog-if-generation-match")
