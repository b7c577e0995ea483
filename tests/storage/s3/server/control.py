# SPDX-License-Identifier: Apache-2.0
"""/_control/: what tests look at and change. Requests are not signed. JSON in and out.

GET /_control/state?log=N
    All there is: objects, uploads, counts of requests, faults, and the last N (100) requests.
GET /_control/object?bucket=B&key=K
    The bytes of an object.
POST /_control/reset
    Removes objects, uploads, faults, log and clock skew. The region and the keys are those of the start again.
POST /_control/fault
    One fault, or a list of them (faults.py). {"clear": true} removes all.
POST /_control/put
    {"bucket", "key", "text" | "base64" | "zeros": bytes, "metadata": {}, "headers": {}, "checksum": true}. With
    "flip": N, byte N is spoiled after the checksums were computed.
POST /_control/upload
    An unfinished upload: {"bucket", "key", "age_s", "parts": {"1": text}, "algorithm", "type"}.
POST /_control/delete
    {"bucket", "key"} or {"bucket", "upload_id"}.
POST /_control/credentials
    Adds a key: {"access_key", "secret_key", "session_token", "expires_in_s", "serve": true}; or makes one:
    {"mint": true}. The fake endpoints serve the last one. {"expire": true, "access_key"}: it, or every key, has
    expired. {"lifetime_s"}: of keys that are made. {"renew": false}: the endpoints serve expired keys too.
POST /_control/settings
    {"region", "skew_s", "read_only": {"bucket": true}, "conditional", "checksums"}. "hang_connections": N: the next
    N connections are accepted and get no byte, not even of a TLS handshake. "drop_connections": N: they are closed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

import checksums
from errors import S3Error
from http1 import Request, Response
from store import Blob, Checksum, Object, Part, Upload, describe_headers, new_upload_id

if TYPE_CHECKING:
    from service import Service

DOCUMENT_BYTES_MAX = 64 << 20
LOG_SHOWN = 100


def _json(document: Any, status: int = 200) -> Response:
    return Response(status, {"Content-Type": "application/json"}, json.dumps(document).encode())


async def handle(service: Service, request: Request) -> Response:
    name = request.path[len("/_control/") :]
    try:
        if request.method == "GET" and name == "state":
            return _json(state(service, int(request.query.get("log", LOG_SHOWN))))
        if request.method == "GET" and name == "object":
            found = service.store.bucket(request.query["bucket"]).objects[request.query["key"]]
            return Response(segments=found.slices(0, found.size), owner=found)
        changers = {
            "reset": _reset, "fault": _fault, "put": _put, "upload": _upload, "delete": _delete,
            "credentials": _credentials, "settings": _settings,
        }  # fmt: skip
        if request.method != "POST" or name not in changers:
            return _json({"error": f"no {request.method} /_control/{name}"}, 404)
        body = await request.receive_bytes(DOCUMENT_BYTES_MAX)
        return _json(changers[name](service, json.loads(body or b"{}")) or {})
    except (KeyError, TypeError, ValueError, AttributeError, S3Error) as error:
        return _json({"error": f"{type(error).__name__}: {error}"}, 400)


def _crc_text(crc: int | None) -> str | None:
    return None if crc is None else checksums.encode(crc.to_bytes(4, "big"))


def _checksum(checksum: Checksum | None) -> dict | None:
    return (
        None
        if checksum is None
        else {"algorithm": checksum.algorithm, "value": checksum.value, "type": checksum.kind}
    )


def _part_state(part: Part) -> dict:
    return {
        "size": part.size,
        "etag": part.etag,
        "crc32c": _crc_text(part.crc32c),
        "checksum": _checksum(part.checksum),
    }


def state(service: Service, log: int) -> dict:
    buckets = service.store.buckets
    return {
        "objects": {
            bucket.name: {
                found.key: {
                    "size": found.size,
                    "etag": found.etag,
                    "crc32c": _crc_text(found.crc32c),
                    "checksum": _checksum(found.checksum),
                    "parts": len(found.parts),
                    "modified": found.modified,
                    **describe_headers(found.headers),
                }
                for found in bucket.objects.values()
            }
            for bucket in buckets.values()
        },
        "uploads": {
            bucket.name: [
                {
                    "upload_id": upload.upload_id,
                    "key": upload.key,
                    "initiated": upload.initiated,
                    "algorithm": upload.algorithm,
                    "type": upload.kind,
                    "parts": {number: _part_state(part) for number, part in sorted(upload.parts.items())},
                    **describe_headers(upload.headers),
                }
                for upload in bucket.uploads.values()
            ]
            for bucket in buckets.values()
        },
        "requests": dict(service.counts),
        "connections": service.connections_accepted,
        "memory": service.store.used,
        "region": service.region,
        "now": service.now(),
        "faults": [
            {**fault.spec, "seen": fault.seen, "fired": fault.fired} for fault in service.faults.known
        ],
        "log": list(service.log)[-log:] if log else [],
    }


def _reset(service: Service, document: dict) -> None:
    service.reset()


def _fault(service: Service, document: Any) -> dict:
    specs = document if isinstance(document, list) else [document]
    for spec in specs:
        if isinstance(spec, dict) and spec.get("clear"):
            service.faults.known.clear()
        else:
            service.faults.add(spec)
    return {"faults": len(service.faults.known)}


def _blob(service: Service, data: bytes) -> Blob:
    blob = Blob(service.store, len(data), keep=True)
    assert blob.view is not None
    blob.view[:] = data
    return blob


def _bytes(document: dict) -> bytes:
    if "base64" in document:
        return base64.b64decode(document["base64"], validate=True)
    return bytes(int(document["zeros"])) if "zeros" in document else str(document.get("text", "")).encode()


def _kept(document: dict) -> dict[str, str]:
    kept = {"content-type": "binary/octet-stream", **document.get("headers", {})}
    kept.update({f"x-amz-meta-{name.lower()}": value for name, value in document.get("metadata", {}).items()})
    return kept


def _put(service: Service, document: dict) -> dict:
    data = _bytes(document)
    blob, crc = _blob(service, data), checksums.crc32c(data)
    md5 = hashlib.md5(data, usedforsecurity=False).digest()
    has = document.get("checksum", True) and service.use_checksums
    made = Object(
        key=document["key"],
        size=len(data),
        blobs=[blob],
        etag=md5.hex(),
        modified=service.now(),
        crc32c=crc,
        checksum=Checksum("CRC32C", str(_crc_text(crc)), "FULL_OBJECT") if has else None,
        headers=_kept(document),
        md5=md5,
        generation=service.store.next_generation(),
    )
    if "flip" in document:
        assert blob.view is not None
        blob.view[int(document["flip"])] ^= 1
    service.store.bucket(document["bucket"]).put(made)
    return {"etag": made.etag, "crc32c": _crc_text(crc)}


def _upload(service: Service, document: dict) -> dict:
    algorithm = document.get("algorithm")
    kind = document.get("type", "COMPOSITE") if algorithm else None
    at = service.now() - float(document.get("age_s", 0))
    upload = Upload(new_upload_id(), document["key"], at, _kept(document), algorithm, kind)
    for number, text in document.get("parts", {}).items():
        data = str(text).encode()
        digest = b""
        if algorithm:
            made = checksums.new(algorithm)
            made.update(data)
            digest = made.digest()
        upload.parts[int(number)] = Part(
            blob=_blob(service, data),
            size=len(data),
            etag=hashlib.md5(data, usedforsecurity=False).hexdigest(),
            modified=at,
            crc32c=checksums.crc32c(data),
            checksum=Checksum(algorithm, checksums.encode(digest), "FULL_OBJECT") if algorithm else None,
            digest=digest,
        )
    service.store.bucket(document["bucket"]).begin(upload)
    return {"upload_id": upload.upload_id}


def _delete(service: Service, document: dict) -> None:
    bucket = service.store.bucket(document["bucket"])
    if "upload_id" in document:
        del bucket.uploads[document["upload_id"]]
    else:
        bucket.remove(document["key"])


def _credentials(service: Service, document: dict) -> dict:
    return service.credentials.configure(document, service.now())


def _settings(service: Service, document: dict) -> None:
    counts = {"hang_connections", "drop_connections"}
    unknown = set(document) - {"region", "skew_s", "read_only", "conditional", "checksums"} - counts
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")
    service.region = document.get("region", service.region)
    service.skew_s = float(document.get("skew_s", service.skew_s))
    service.conditional = document.get("conditional", service.conditional)
    service.use_checksums = document.get("checksums", service.use_checksums)
    service.hang_connections = int(document.get("hang_connections", service.hang_connections))
    service.drop_connections = int(document.get("drop_connections", service.drop_connections))
    for name, value in document.get("read_only", {}).items():
        service.store.bucket(name).read_only = bool(value)
