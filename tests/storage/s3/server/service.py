# SPDX-License-Identifier: Apache-2.0
"""Serves requests: finds bucket and operation, verifies the signature, applies faults, logs the outcome."""

from __future__ import annotations

import argparse
import asyncio
import collections
import ipaddress
import re
import secrets
import socket
import ssl
import sys
import time
import traceback
from typing import Any

import control
import listing
import multipart
import objects
import signature
from credentials import Credential, Credentials
from errors import S3Error, xml_document
from faults import Faults, Fired
from http1 import (
    Closed,
    Connection,
    PlainLink,
    Request,
    Response,
    TlsLink,
    decode_target,
    http_date,
    send_response,
)
from store import Bucket, Store

KEY_BYTES_MAX = 1024  # S3's
SECRET_HEADERS = {"authorization", "x-amz-security-token", "x-aws-ec2-metadata-token"}  # not in the log
SUBRESOURCES_OF_OBJECTS = {
    "acl",
    "tagging",
    "torrent",
    "retention",
    "legal-hold",
    "attributes",
    "restore",
    "select",
}
SUBRESOURCES_OF_BUCKETS = {
    "acl", "accelerate", "analytics", "cors", "encryption", "intelligent-tiering", "inventory", "lifecycle", "logging",
    "metrics", "notification", "object-lock", "ownershipControls", "policy", "policyStatus", "publicAccessBlock",
    "replication", "requestPayment", "tagging", "versioning", "versions", "website",
}  # fmt: skip
WRITES = {"PutObject", "DeleteObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload",
          "AbortMultipartUpload"}  # fmt: skip


def operation_of(method: str, bucket: str, key: str, query: dict[str, str]) -> str:
    """S3's name of the operation. S3Error: S3 has no such operation, or this server has not."""
    if not bucket:
        raise S3Error("NotImplemented", "ListBuckets is not implemented.")
    odd = (SUBRESOURCES_OF_OBJECTS if key else SUBRESOURCES_OF_BUCKETS) & set(query)
    if odd:
        raise S3Error("NotImplemented", f"Subresource {sorted(odd)[0]} is not implemented.")
    if key:
        of_upload = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload",
                     "GET": "ListParts"}  # fmt: skip
        plain = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
        if method == "POST" and "uploads" in query:
            return "CreateMultipartUpload"
        table = of_upload if "uploadId" in query else plain
        if method == "PUT" and ("partNumber" in query) != ("uploadId" in query):
            raise S3Error("InvalidArgument", "partNumber and uploadId come together.")
    elif method == "POST" and "delete" in query:
        return "DeleteObjects"
    elif "uploads" in query:
        table = {"GET": "ListMultipartUploads"}
    elif "location" in query:
        table = {"GET": "GetBucketLocation"}
    else:
        table = {"GET": "ListObjectsV2", "HEAD": "HeadBucket"}
        if method in ("PUT", "DELETE"):
            raise S3Error("NotImplemented", "Buckets are made by --bucket.")
    if method not in table:
        raise S3Error("MethodNotAllowed", Method=method, ResourceType="OBJECT" if key else "BUCKET")
    return table[method]


class Service:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        verify = "nothing" if options.no_verify_large else "crc" if options.no_md5_large else "all"
        self.store = Store(options.memory_limit, options.discard, verify)
        self.part_min: int = options.part_min
        self.gcs: bool = options.gcs
        self.faults = Faults()
        self.connections_accepted = 0
        self._running: set[asyncio.Task] = set()
        self._hanging: list[socket.socket] = []
        self._tls: ssl.SSLContext | None = None
        if options.tls_cert:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(options.tls_cert, options.tls_key)
        for name in [*options.bucket, *options.read_only]:
            self.store.buckets.setdefault(name, Bucket(name))
        self.reset()
        for spec in options.fault:
            self.faults.add(spec)

    def reset(self) -> None:
        """The state of the start, without the faults of the command line."""
        options = self._options
        self.store.reset()
        for bucket in self.store.buckets.values():
            bucket.read_only = bucket.name in options.read_only
        self.region: str = options.region
        self.skew_s = 0.0
        self.conditional: bool = not options.no_conditional
        self.use_checksums: bool = not (options.no_checksums or options.gcs)
        self.hang_connections = self.drop_connections = 0
        for sock in self._hanging:
            sock.close()
        self._hanging.clear()
        self.faults.known.clear()
        self.counts: collections.Counter[str] = collections.Counter()
        self.log: collections.deque[dict[str, Any]] = collections.deque(maxlen=options.log_requests)
        self.credentials = Credentials(options.container_token, options.web_identity_token)
        self.credentials.add(Credential(options.access_key, options.secret_key, options.session_token))

    def now(self) -> float:
        return time.time() + self.skew_s

    async def accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            self.connections_accepted += 1
            if self.drop_connections:
                self.drop_connections -= 1
                sock.close()
                continue
            if self.hang_connections:
                self.hang_connections -= 1
                self._hanging.append(sock)
                continue
            task = loop.create_task(self._serve_connection(sock, self.connections_accepted))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _serve_connection(self, sock: socket.socket, number: int) -> None:
        link = TlsLink(sock, self._tls) if self._tls is not None else PlainLink(sock)
        connection = Connection(link, number)
        try:
            await link.start()
            while await self._serve_request(connection):
                pass
        except Closed:
            pass  # by the client or a fault; the log says which
        except Exception:  # a bug of this server: the tests must see it
            traceback.print_exc(file=sys.stderr)
        finally:
            link.close()

    async def _serve_request(self, connection: Connection) -> bool:
        """False: the connection ends here."""
        request_id = secrets.token_hex(8).upper()
        try:
            request = await connection.read_request()
        except S3Error as error:
            request = Request("GET", "/", "/", "", {}, False, 0, False, connection=connection)
            await self._answer(
                request, self._error_response(request, error, request_id), request_id, Fired([], "GET")
            )
            await connection.link.linger()
            return False
        if request is None:
            return False
        started = time.monotonic()
        fired = request.faults = Fired([], request.method)
        outcome, code, sent, response = "closed", "", 0, None
        try:
            try:
                response = await self._dispatch(request)
                fired = request.faults
            except S3Error as error:
                fired, code = request.faults, error.code
                response = self._error_response(request, error, request_id)
            unread = request.remaining > 0 or request.chunked
            response.close = response.close or unread or not request.keep_alive
            sent = await self._answer(request, response, request_id, fired)
            outcome = "answered"
        except Closed as error:
            fired, outcome = request.faults, str(error) or "closed"
            raise
        finally:
            if not request.path.startswith("/_control/"):
                self._note(
                    request, fired, outcome, response, code, sent, request_id, time.monotonic() - started
                )
        if response.close:
            await connection.link.linger()
            return False
        return await self._stays_open(connection, fired)

    async def _stays_open(self, connection: Connection, fired: Fired) -> bool:
        fault = fired.get("close_idle")
        if fault is None:
            return True
        if fault.get("when") == "next_request":
            await connection.wait()
            connection.link.reset()
        else:
            await asyncio.sleep(float(fault.get("after_s", 0)))
        return False

    async def _answer(self, request: Request, response: Response, request_id: str, fired: Fired) -> int:
        common = {"x-amz-id-2": secrets.token_urlsafe(24), "x-amz-request-id": request_id}
        common.update({"Date": http_date(self.now()), "Server": "AmazonS3"})
        response.headers = {**common, **response.headers}
        if request.google:
            self._rename(response.headers, "x-amz-", "x-goog-", ("meta-", "storage-class"))
        return await send_response(request, response, fired)

    @staticmethod
    def _rename(headers: dict[str, str], old: str, new: str, ends: tuple[str, ...]) -> None:
        """Objects keep their headers under S3's names; Google has its own."""
        for name in [name for name in headers if name.startswith(tuple(old + end for end in ends))]:
            headers[new + name[len(old) :]] = headers.pop(name)

    def error_body(self, request: Request, error: S3Error, request_id: str = "0") -> bytes:
        return error.body(request.raw_path, request_id, secrets.token_urlsafe(24))

    def _error_response(self, request: Request, error: S3Error, request_id: str) -> Response:
        body = b"" if request.method == "HEAD" else self.error_body(request, error, request_id)
        headers = {"Content-Type": "application/xml", **error.headers}
        return Response(error.status, headers, body, close=error.status >= 500 or error.code == "BadRequest")

    def _note(self, request: Request, fired: Fired, outcome: str, response: Response | None, code: str, sent: int,
              request_id: str, seconds: float) -> None:  # fmt: skip
        self.counts[request.operation] += 1
        self.log.append(
            {
                "id": request_id,
                "connection": request.connection.number,
                "method": request.method,
                "operation": request.operation,
                "bucket": request.bucket,
                "key": request.key,
                "query": request.query,
                "status": response.status if response is not None and outcome == "answered" else None,
                "code": code,
                "outcome": outcome,
                "received": request.received,
                "sent": sent,
                "faults": fired.kinds,
                "seconds": round(seconds, 6),
                "headers": {n: v for n, v in request.headers.items() if n not in SECRET_HEADERS},
            }
        )

    async def _dispatch(self, request: Request) -> Response:
        decode_target(request)
        bucket_of_host = self._bucket_of_host(request.headers["host"])
        if bucket_of_host is None and request.path.startswith("/_control/"):
            request.operation = "Control"
            return await control.handle(self, request)
        if bucket_of_host is None and (fake := self._fake_endpoint(request)) is not None:
            request.operation = fake
            request.faults = self.faults.take(request)
            request.faults.at_head(request)
            await request.faults.before_body(request)
            if not request.remaining:
                await request.faults.after_body(request)
            response = await self._serve_fake(request)
            await request.faults.after_effect(request)
            return response
        if bucket_of_host is not None:
            request.bucket, request.key = bucket_of_host, request.path[1:]
        else:
            request.bucket, _, request.key = request.path[1:].partition("/")
        request.operation = operation_of(request.method, request.bucket, request.key, request.query)
        request.faults = self.faults.take(request)
        self._happen_before(request)
        regions = [self.region, "auto"] if self.gcs else [self.region]
        signature.verify(request, self.credentials, regions, self.now(), self.gcs)
        if request.google:
            self._rename(request.headers, "x-goog-", "x-amz-", ("meta-", "storage-class"))
        if len(request.key.encode()) > KEY_BYTES_MAX:
            raise S3Error("KeyTooLongError", Size=len(request.key.encode()), MaxSizeAllowed=KEY_BYTES_MAX)
        bucket = self.store.bucket(request.bucket)
        if bucket.read_only and request.operation in WRITES:
            raise S3Error("AccessDenied")
        if (redirect := request.faults.get("redirect")) is not None and redirect.get("move"):
            self.region = redirect["region"]
        request.faults.at_head(request)
        await request.faults.before_body(request)
        if not request.remaining:
            await request.faults.after_body(request)
        response = await self._operate(request, bucket)
        if request.remaining:
            # The operation has no use for this body. It is read, so that it is not taken for the next request.
            scratch = request.connection.scratch()
            await request.receive(lambda count: scratch[:count], lambda view: None)
        await request.faults.after_effect(request)
        request.faults.change_reply(request, response)
        return response

    async def _operate(self, request: Request, bucket: Bucket) -> Response:
        operation = request.operation
        waiting = {
            "PutObject": objects.put_object,
            "DeleteObjects": objects.delete_objects,
            "CreateMultipartUpload": multipart.create,
            "UploadPart": multipart.upload_part,
            "CompleteMultipartUpload": multipart.complete,
        }
        if operation in waiting:
            return await waiting[operation](self, request, bucket)
        empty = request.payload
        if not request.remaining and empty not in (signature.UNSIGNED, signature.EMPTY):
            raise S3Error(
                "XAmzContentSHA256Mismatch",
                ClientComputedContentSHA256=empty,
                S3ComputedContentSHA256=signature.EMPTY,
            )
        direct = {
            "GetObject": objects.get_object,
            "HeadObject": objects.get_object,
            "DeleteObject": objects.delete_object,
            "AbortMultipartUpload": multipart.abort,
            "ListObjectsV2": listing.list_objects,
            "ListParts": listing.list_parts,
            "ListMultipartUploads": listing.list_uploads,
            "HeadBucket": self._head_bucket,
            "GetBucketLocation": self._location,
        }
        return direct[operation](self, request, bucket)

    @staticmethod
    def _head_bucket(service: Service, request: Request, bucket: Bucket) -> Response:
        return Response(headers={"x-amz-bucket-region": service.region, "Content-Type": "application/xml"})

    @staticmethod
    def _location(service: Service, request: Request, bucket: Bucket) -> Response:
        # S3's oldest region has no name here.
        region = "" if service.region == "us-east-1" else service.region
        document = xml_document("LocationConstraint", region)
        return Response(headers={"Content-Type": "application/xml"}, body=document)

    def _happen_before(self, request: Request) -> None:
        """Faults that change something before the request is served."""
        get = request.faults.get
        if (skew := get("clock_skew")) is not None:
            self.skew_s = float(skew["seconds"])
        if (expire := get("expire_credentials")) is not None:
            match = re.search("Credential=([^/]*)/", request.headers.get("authorization", ""))
            key = match.group(1) if match is not None and not expire.get("all") else None
            self.credentials.expire(key, self.now())
        if get("abort_upload") is not None and request.bucket in self.store.buckets:
            self.store.buckets[request.bucket].uploads.pop(request.query.get("uploadId", ""), None)

    def _bucket_of_host(self, host: str) -> str | None:
        """Virtual-host style: the bucket before the domain. None: path style."""
        name = re.sub(r":\d+$", "", host).lower()
        try:
            ipaddress.ip_address(name.strip("[]"))
            return None
        except ValueError:
            pass
        domain = self._options.domain.lower()
        if name.endswith("." + domain):
            return name[: -len(domain) - 1]
        first = name.partition(".")[0]
        return first if "." in name and first in self.store.buckets else None

    @staticmethod
    def _fake_endpoint(request: Request) -> str | None:
        path = request.path
        if path == "/_sts" or path.startswith("/_sts/"):
            return "StsAssumeRoleWithWebIdentity"
        if path.startswith("/_container/"):
            return "ContainerCredentials"
        if path.startswith(("/_imds/", "/latest/api/token", "/latest/meta-data/")):
            return "ImdsToken" if path.endswith("/api/token") else "ImdsData"
        return None

    async def _serve_fake(self, request: Request) -> Response:
        if request.operation.startswith("Imds"):
            return self.credentials.imds(
                request, request.path.removeprefix("/_imds"), self.region, self.now()
            )
        if request.operation.startswith("Container"):
            return self.credentials.container(request, self.now())
        return await self.credentials.sts(request, self.now())
