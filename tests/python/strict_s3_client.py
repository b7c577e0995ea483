# SPDX-License-Identifier: Apache-2.0
"""A small S3 client with its own signer, and the strict server as a fixture, for the server's own tests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import pathlib
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from urllib.parse import quote

import pytest

SERVER = pathlib.Path(__file__).resolve().parents[1] / "storage" / "s3" / "server"
ACCESS, SECRET, REGION = "AKTEST", "se/cr+et", "eu-test-1"
EMPTY = hashlib.sha256(b"").hexdigest()


def crc(data: bytes) -> str:
    """CRC32C in base64, computed bit by bit, independently of the server's code."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return base64.b64encode((value ^ 0xFFFFFFFF).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def xml(self):
        root = ElementTree.fromstring(self.body)
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root

    @property
    def code(self):
        return self.xml.findtext("Code")

    def texts(self, path):
        return [element.text for element in self.xml.findall(path)]


class Client:
    """Signs requests by Signature Version 4. A test makes a request wrong by `change`."""

    def __init__(self, port, access=ACCESS, secret=SECRET, token=None, region=REGION, context=None):
        self.port, self.access, self.secret, self.token, self.region = port, access, secret, token, region
        self.connection = (
            http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            if context is None
            else http.client.HTTPSConnection("localhost", port, timeout=60, context=context)
        )

    def sign(self, method, path, query, headers, payload, **change):
        at = change.get("at", time.time())
        stamp = change.get("stamp", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at)))
        google = change.get("google", False)
        service = change.get("service", "storage" if google else "s3")
        date, own = change.get("date", stamp[:8]), "x-goog-" if google else "x-amz-"
        algorithm = "GOOG4-HMAC-SHA256" if google else "AWS4-HMAC-SHA256"
        signed = {
            "host": f"127.0.0.1:{self.port}",
            **{name.lower(): value for name, value in headers.items()},
        }
        signed.update({f"{own}date": stamp, f"{own}content-sha256": payload})
        if self.token is not None:
            signed["x-amz-security-token"] = self.token
        left_out = {name: signed.pop(name) for name in change.get("unsigned", ())}
        pairs = sorted((quote(n, safe=""), quote(v, safe="")) for n, v in query.items())
        names = ";".join(sorted(signed))
        lines = [method, quote(path, safe="/~"), "&".join(f"{n}={v}" for n, v in pairs)]
        lines += [f"{name}:{' '.join(signed[name].split())}" for name in sorted(signed)]
        canonical = "\n".join([*lines, "", names, payload])
        scope = f"{date}/{self.region}/{service}/{'goog4' if google else 'aws4'}_request"
        to_sign = f"{algorithm}\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = algorithm.partition("-")[0].encode() + self.secret.encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
        signed.update(left_out)
        signed["authorization"] = change.get("authorization") or (
            f"{algorithm} Credential={self.access}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return signed

    def __call__(
        self, method, path, query=None, headers=None, body=None, payload="UNSIGNED-PAYLOAD", **change
    ):
        query = query or {}
        signed = self.sign(method, path, query, headers or {}, payload, **change)
        for name in change.get("without", ()):
            del signed[name]
        target = quote(path, safe="/~") + (
            "?" + "&".join(f"{quote(n, safe='')}={quote(v, safe='')}" for n, v in query.items())
            if query
            else ""
        )
        self.connection.putrequest(
            method, change.get("target", target), skip_host=True, skip_accept_encoding=True
        )
        if body is not None and "content-length" not in signed and not change.get("no_length"):
            signed["content-length"] = str(len(body))
        for name, value in signed.items():
            self.connection.putheader(name, value)
        self.connection.endheaders()
        try:
            if body:
                self.connection.send(body)
            answer = self.connection.getresponse()
            return Reply(answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read())
        except Exception:
            self.connection.close()
            raise


class Server:
    def __init__(self, *options):
        command = [sys.executable, str(SERVER / "strict_s3.py"), "--until-stdin-closes", "--region", REGION]
        command += [
            "--bucket",
            "one",
            "two",
            "--read-only",
            "ro",
            "--access-key",
            ACCESS,
            "--secret-key",
            SECRET,
        ]
        command += ["--part-min", "100", *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.port = json.loads(self.process.stdout.readline())["port"]

    def control(self, name, document=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET" if document is None else "POST", f"/_control/{name}", json.dumps(document))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if name.startswith("object"):
            return body
        assert answer.status == 200, body
        return json.loads(body)

    def fault(self, kind, **members):
        self.control("fault", {"kind": kind, **members})

    @property
    def last(self):
        return self.control("state")["log"][-1]

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0


@pytest.fixture(scope="module")
def running():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def server(running):
    running.control("reset", {})
    return running


@pytest.fixture
def s3(server):
    client = Client(server.port)
    yield client
    client.connection.close()


def fresh(server, **options):
    return Client(server.port, **options)


def begin(s3, key="/one/big", **headers):
    reply = s3("POST", key, {"uploads": ""}, {n.replace("_", "-"): v for n, v in headers.items()}, b"")
    assert reply.status == 200, reply.body
    return reply.xml.findtext("UploadId")


def put_part(s3, upload, number, data, key="/one/big", checksum=True):
    headers = {"x-amz-checksum-crc32c": crc(data)} if checksum else {}
    return s3("PUT", key, {"partNumber": str(number), "uploadId": upload}, headers, data)


def finish(s3, upload, parts, key="/one/big", checksum=True, headers=None):
    """Completes an upload. `parts`: (number, data)."""
    xml = "".join(
        f'<Part><PartNumber>{number}</PartNumber><ETag>"{hashlib.md5(data).hexdigest()}"</ETag>'
        + (f"<ChecksumCRC32C>{crc(data)}</ChecksumCRC32C>" if checksum else "")
        + "</Part>"
        for number, data in parts
    )
    body = f"<CompleteMultipartUpload>{xml}</CompleteMultipartUpload>".encode()
    return s3("POST", key, {"uploadId": upload}, headers, body)


def raw(server):
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    return sock, sock.makefile("rb")


def head(s3, method, path, body=b"", **headers):
    signed = s3.sign(
        method, path, {}, {n.replace("_", "-"): v for n, v in headers.items()}, "UNSIGNED-PAYLOAD"
    )
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{n}: {v}" for n, v in signed.items()),
        f"content-length: {len(body)}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def answer(file):
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, file.read(int(headers.get("content-length", 0)))


def listed(s3, **query):
    """Lists all pages; returns every key and common prefix."""
    keys, folders, token = [], [], {}
    while True:
        named = {name.replace("_", "-"): value for name, value in query.items()}
        reply = s3("GET", "/one", {"list-type": "2", **named, **token})
        assert reply.status == 200, reply.body
        keys += reply.texts("Contents/Key")
        folders += reply.texts("CommonPrefixes/Prefix")
        if reply.xml.findtext("IsTruncated") == "false":
            assert reply.xml.find("NextContinuationToken") is None
            return keys, folders
        token = {"continuation-token": reply.xml.findtext("NextContinuationToken")}
