# SPDX-License-Identifier: Apache-2.0
"""The strict S3 server of tests/storage/s3/server: what it accepts, and what it refuses.
test_strict_s3_signatures.py tests signatures."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
import zlib

import pytest

import strict_s3_client
from strict_s3_client import (
    REGION,
    SERVER,
    Client,
    Server,
    answer,
    begin,
    crc,
    finish,
    fresh,
    head,
    listed,
    md5,
    put_part,
    raw,
)

sys.path.append(str(SERVER))  # at the end, because its modules have short names

import checksums  # noqa: E402

# The fixtures: one server for all tests of this file, reset before each.
running, server, s3 = strict_s3_client.running, strict_s3_client.server, strict_s3_client.s3

# Objects


def test_an_object_comes_back_with_all_that_was_put(server, s3):
    data = bytes(range(256)) * 10
    headers = {
        "x-amz-checksum-crc32c": crc(data),
        "x-amz-sdk-checksum-algorithm": "CRC32C",
        "content-md5": md5(data),
        "content-type": "text/x",
        "x-amz-meta-step": "100",
        "x-amz-storage-class": "STANDARD_IA",
        "x-amz-server-side-encryption": "AES256",
    }
    reply = s3("PUT", "/one/dir/a", headers=headers, body=data)
    assert reply.headers["etag"] == f'"{hashlib.md5(data).hexdigest()}"'
    assert reply.headers["x-amz-checksum-crc32c"] == crc(data)
    assert reply.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    assert reply.headers["x-amz-server-side-encryption"] == "AES256"
    for method in ("GET", "HEAD"):
        reply = s3(method, "/one/dir/a", headers={"x-amz-checksum-mode": "ENABLED"})
        assert reply.body == (data if method == "GET" else b"")
        assert reply.headers["content-length"] == str(len(data))
        assert reply.headers["x-amz-checksum-crc32c"] == crc(data)
        assert {name: reply.headers[name] for name in list(headers)[3:]} == {
            n: headers[n] for n in list(headers)[3:]
        }
        assert "x-amz-checksum-crc32c" not in s3(method, "/one/dir/a").headers
    state = server.control("state")
    found = state["objects"]["one"]["dir/a"]
    assert (found["size"], found["crc32c"], found["metadata"]) == (len(data), crc(data), {"step": "100"})
    assert found["headers"]["x-amz-server-side-encryption"] == "AES256"
    assert state["requests"] == {"PutObject": 1, "GetObject": 2, "HeadObject": 2}
    assert server.control("object?bucket=one&key=dir/a") == data
    assert s3("DELETE", "/one/dir/a").status == s3("DELETE", "/one/dir/a").status == 204
    assert server.control("state")["objects"]["one"] == {}


def test_ranges(s3):
    s3("PUT", "/one/a", body=b"0123456789")
    for given, expected in (
        ("0-3", b"0123"),
        ("8-", b"89"),
        ("-3", b"789"),
        ("5-99", b"56789"),
        ("-99", b"0123456789"),
    ):
        reply = s3("GET", "/one/a", headers={"range": f"bytes={given}"})
        assert (reply.status, reply.body) == (206, expected)
    assert reply.headers["content-range"] == "bytes 0-9/10"
    assert s3("GET", "/one/a", headers={"range": "bytes=5-2"}).status == 200
    reply = s3("GET", "/one/a", headers={"range": "bytes=10-"})
    assert (reply.status, reply.code, reply.xml.findtext("ActualObjectSize")) == (416, "InvalidRange", "10")
    s3("PUT", "/one/empty", body=b"")
    assert s3("GET", "/one/empty", headers={"range": "bytes=0-"}).code == "InvalidRange"
    assert s3("GET", "/one/empty").body == b""


def test_wrong_digests_are_refused_and_nothing_is_kept(server):
    def code(**headers):
        reply = fresh(server)(
            "PUT", "/one/a", headers={n.replace("_", "-"): v for n, v in headers.items()}, body=b"abc"
        )
        return reply.status, reply.code

    assert code(content_md5=md5(b"abd")) == (400, "BadDigest")
    assert code(content_md5="short") == (400, "InvalidDigest")
    assert code(x_amz_checksum_crc32c=crc(b"abd")) == (400, "BadDigest")
    assert code(x_amz_checksum_crc32c="AAAA") == (400, "InvalidRequest")
    assert code(x_amz_checksum_crc32c="!") == (400, "InvalidRequest")
    assert code(x_amz_checksum_sha256=base64.b64encode(bytes(32)).decode()) == (400, "BadDigest")
    assert code(x_amz_checksum_crc64nvme="AAAAAAAAAAA=") == (501, "NotImplemented")
    assert code(x_amz_checksum_crc32c=crc(b"abc"), x_amz_checksum_crc32="AAAAAA==") == (400, "InvalidRequest")
    assert code(x_amz_sdk_checksum_algorithm="CRC32C") == (400, "InvalidRequest")
    assert code(x_amz_sdk_checksum_algorithm="CRC32", x_amz_checksum_crc32c=crc(b"abc")) == (
        400,
        "InvalidRequest",
    )
    assert code(x_goog_hash="crc32c=AAAAAA==") == (400, "BadDigest")
    assert code(x_goog_hash="crc32c=AAAA") == (400, "InvalidArgument")
    assert code(x_amz_sdk_checksum_algorithm="ADLER", x_amz_checksum_crc32c=crc(b"abc")) == (
        400,
        "InvalidRequest",
    )
    assert code(x_amz_trailer="x-amz-checksum-crc32c") == (501, "NotImplemented")
    assert server.control("state")["objects"]["one"] == {}
    good = base64.b64encode(zlib.crc32(b"abc").to_bytes(4, "big")).decode()
    assert fresh(server)("PUT", "/one/a", headers={"x-amz-checksum-crc32": good}, body=b"abc").status == 200


def test_wrong_headers_of_an_object_are_refused(server):
    def code(**headers):
        return fresh(server)(
            "PUT", "/one/a", headers={n.replace("_", "-"): v for n, v in headers.items()}, body=b""
        ).code

    assert code(x_amz_server_side_encryption="rot13") == "InvalidArgument"
    assert (
        code(x_amz_server_side_encryption="AES256", x_amz_server_side_encryption_aws_kms_key_id="k")
        == "InvalidArgument"
    )
    assert code(x_amz_server_side_encryption_customer_algorithm="AES256") == "NotImplemented"
    assert code(x_amz_server_side_encryption_bucket_key_enabled="maybe") == "InvalidArgument"
    assert (
        code(x_amz_server_side_encryption="aws:kms", x_amz_server_side_encryption_context="!")
        == "InvalidArgument"
    )
    assert code(x_amz_storage_class="CELLAR") == "InvalidStorageClass"
    assert code(x_amz_meta_a="x" * 2049) == "MetadataTooLarge"
    assert code(x_amz_acl="private") == "NotImplemented"
    assert code(x_amz_copy_source="/one/b") == "NotImplemented"
    assert fresh(server)("PUT", "/one/" + "k" * 1025, body=b"").code == "KeyTooLongError"
    assert fresh(server)("PUT", "/one/" + "k" * 1024, body=b"").status == 200
    assert (
        fresh(server)("GET", "/one/a", headers={"x-amz-server-side-encryption": "AES256"}).code
        == "InvalidArgument"
    )


def test_an_etag_with_kms_is_no_md5(s3):
    reply = s3("PUT", "/one/a", headers={"x-amz-server-side-encryption": "aws:kms"}, body=b"abc")
    assert re.fullmatch('"[0-9a-f]{32}"', reply.headers["etag"])
    assert reply.headers["etag"] != f'"{hashlib.md5(b"abc").hexdigest()}"'


def test_lengths(server):
    reply = fresh(server)("PUT", "/one/a", body=b"x", no_length=True)
    assert (reply.status, reply.code) == (411, "MissingContentLength")
    reply = fresh(server)(
        "PUT", "/one/a", headers={"transfer-encoding": "chunked"}, body=b"1\r\nx\r\n0\r\n\r\n", no_length=True
    )
    assert (reply.status, reply.code) == (411, "MissingContentLength")
    reply = fresh(server)("PUT", "/one/a", headers={"content-length": str((5 << 30) + 1)})
    assert (reply.status, reply.code) == (400, "EntityTooLarge")
    assert server.control("state")["objects"]["one"] == {}


def test_what_is_not_there_or_not_allowed(server, s3):
    assert s3("GET", "/one/none").code == "NoSuchKey"
    assert s3("HEAD", "/one/none").status == 404
    assert s3("PUT", "/nowhere/a", body=b"").code == "NoSuchBucket"
    assert s3("PATCH", "/one/a").code == "MethodNotAllowed"
    assert s3("POST", "/one/a", body=b"").code == "MethodNotAllowed"
    assert s3("GET", "/one/a", {"acl": ""}).code == "NotImplemented"
    assert s3("GET", "/one/a", {"X-Amz-Signature": "0"}).code == "NotImplemented"
    assert s3("GET", "/").code == "NotImplemented"
    assert s3("PUT", "/three", body=b"").code == "NotImplemented"
    assert s3("GET", "/one/a", {"uploadId": "u"}).code == "NoSuchUpload"
    assert s3("PUT", "/ro/a", body=b"").code == s3("DELETE", "/ro/a").code == "AccessDenied"
    assert s3("POST", "/ro/a", {"uploads": ""}, body=b"").code == "AccessDenied"
    server.control("put", {"bucket": "ro", "key": "a", "text": "planted", "metadata": {"X": "y"}})
    reply = s3("GET", "/ro/a")
    assert (reply.body, reply.headers["x-amz-meta-x"]) == (b"planted", "y")


def test_conditions(server, s3):
    for header in ({"if-none-match": "*"}, {"x-goog-if-generation-match": "0"}):
        assert s3("PUT", "/one/a", headers=header, body=b"1").status == 200
        reply = s3("PUT", "/one/a", headers=header, body=b"2")
        assert (reply.status, reply.code) == (412, "PreconditionFailed")
        assert s3("GET", "/one/a").body == b"1"
        s3("DELETE", "/one/a")
    assert s3("PUT", "/one/a", headers={"if-none-match": '"etag"'}, body=b"1").code == "NotImplemented"
    assert s3("PUT", "/one/a", headers={"if-match": '"x"'}, body=b"1").code == "NoSuchKey"
    assert (
        s3("PUT", "/one/a", headers={"x-goog-if-generation-match": "x"}, body=b"1").code == "InvalidArgument"
    )
    etag = s3("PUT", "/one/a", body=b"1").headers["etag"]
    assert s3("GET", "/one/a", headers={"if-match": etag}).status == 200
    assert s3("GET", "/one/a", headers={"if-match": '"x"'}).code == "PreconditionFailed"
    assert s3("GET", "/one/a", headers={"if-none-match": etag}).status == 304
    assert s3("PUT", "/one/a", headers={"if-match": '"x"'}, body=b"2").code == "PreconditionFailed"
    assert s3("PUT", "/one/a", headers={"if-match": etag}, body=b"2").status == 200
    server.control("settings", {"conditional": False})
    reply = s3("PUT", "/one/c", headers={"if-none-match": "*"}, body=b"1")
    assert (reply.status, reply.code, reply.xml.findtext("Header")) == (
        501,
        "NotImplemented",
        "If-None-Match",
    )


def test_a_store_without_checksums_ignores_them(server, s3):
    server.control("settings", {"checksums": False})
    reply = s3("PUT", "/one/a", headers={"x-amz-checksum-crc32c": "AAAAAA=="}, body=b"1")
    assert reply.status == 200 and "x-amz-checksum-crc32c" not in reply.headers
    assert (
        "x-amz-checksum-crc32c"
        not in s3("HEAD", "/one/a", headers={"x-amz-checksum-mode": "ENABLED"}).headers
    )
    upload = begin(s3, x_amz_checksum_algorithm="CRC32C")
    assert put_part(s3, upload, 1, b"x").status == 200
    assert "ChecksumType" not in finish(s3, upload, [(1, b"x")]).body.decode()


# Listings


def test_listings(s3):
    names = ["a", "a/1", "a/2", "a/b/3", "a0", "b/1", "é", "z z"]
    for name in reversed(names):
        s3("PUT", f"/one/{name}", body=b"xy")
    for size in ({}, {"max_keys": "1"}, {"max_keys": "2"}, {"max_keys": "3"}):
        assert listed(s3, **size) == (["a", "a/1", "a/2", "a/b/3", "a0", "b/1", "z z", "é"], [])
        assert listed(s3, delimiter="/", **size) == (["a", "a0", "z z", "é"], ["a/", "b/"])
        assert listed(s3, delimiter="/", prefix="a/", **size) == (["a/1", "a/2"], ["a/b/"])
        assert listed(s3, start_after="a/2", **size) == (["a/b/3", "a0", "b/1", "z z", "é"], [])
        assert listed(s3, encoding_type="url", prefix="z", **size) == (["z+z"], [])
    reply = s3("GET", "/one", {"list-type": "2", "max-keys": "0"})
    assert reply.xml.findtext("KeyCount") == "0" and reply.xml.findtext("IsTruncated") == "false"
    entry = s3("GET", "/one", {"list-type": "2", "prefix": "b"}).xml.find("Contents")
    assert entry.findtext("Size") == "2" and entry.findtext("ETag") == f'"{hashlib.md5(b"xy").hexdigest()}"'
    assert s3("GET", "/one", {"list-type": "2", "max-keys": "-1"}).code == "InvalidArgument"
    assert s3("GET", "/one", {"list-type": "2", "encoding-type": "hex"}).code == "InvalidArgument"
    assert s3("GET", "/one").code == "NotImplemented"
    token = s3("GET", "/one", {"list-type": "2", "max-keys": "1"}).xml.findtext("NextContinuationToken")
    for query in ({"continuation-token": "x"}, {"continuation-token": token, "prefix": "a"}):
        assert s3("GET", "/one", {"list-type": "2", **query}).code == "InvalidArgument"


def test_buckets(server, s3):
    assert s3("HEAD", "/one").headers["x-amz-bucket-region"] == REGION
    assert s3("HEAD", "/nowhere").status == 404
    assert s3("GET", "/one", {"location": ""}).xml.text == REGION
    reply = s3("PUT", "/virtual", headers={"host": f"one.localhost:{server.port}"}, body=b"v")
    assert reply.status == 200 and s3("GET", "/one/virtual").body == b"v"
    reply = s3("GET", "/virtual", headers={"host": f"nowhere.localhost:{server.port}"})
    assert reply.code == "NoSuchBucket"


def test_several_are_deleted_at_once(server, s3):
    for name in "abc":
        s3("PUT", f"/one/{name}", body=b"")
    body = b"<Delete><Object><Key>a</Key></Object><Object><Key>none</Key></Object></Delete>"
    assert s3("POST", "/one", {"delete": ""}, body=body).code == "InvalidRequest"
    assert s3("POST", "/one", {"delete": ""}, {"content-md5": md5(b"")}, body).code == "BadDigest"
    reply = s3("POST", "/one", {"delete": ""}, {"content-md5": md5(body)}, body)
    assert reply.texts("Deleted/Key") == ["a", "none"]
    quiet = body.replace(b"<Delete>", b"<Delete><Quiet>true</Quiet>").replace(b"none", b"b")
    reply = s3("POST", "/one", {"delete": ""}, {"x-amz-checksum-crc32c": crc(quiet)}, quiet)
    assert reply.status == 200 and len(reply.xml) == 0
    assert listed(s3) == (["c"], [])
    for wrong in (
        b"<Delete></Delete>",
        b"<Delete>",
        body.replace(b"Delete>", b"Other>"),
        body.replace(b"<Delete>", b"<Delete><Loud/>"),
        b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>",
    ):
        assert s3("POST", "/one", {"delete": ""}, {"content-md5": md5(wrong)}, wrong).code == "MalformedXML"
    reply = s3("POST", "/ro", {"delete": ""}, {"content-md5": md5(body)}, body)
    assert reply.texts("Error/Code") == ["AccessDenied", "AccessDenied"]


# Multipart uploads

PARTS = [(1, b"1" * 100), (2, b"2" * 150), (3, b"3")]
WHOLE = b"".join(data for _, data in PARTS)


@pytest.mark.parametrize("kind", ["COMPOSITE", "FULL_OBJECT"])
def test_a_multipart_upload(server, s3, kind):
    upload = begin(
        s3,
        x_amz_checksum_algorithm="CRC32C",
        x_amz_checksum_type=kind,
        x_amz_meta_a="b",
        x_amz_server_side_encryption="AES256",
    )
    for number, data in reversed(PARTS):
        reply = put_part(s3, upload, number, data)
        assert (reply.headers["x-amz-checksum-crc32c"], reply.headers["etag"]) == (
            crc(data),
            f'"{hashlib.md5(data).hexdigest()}"',
        )
        assert reply.headers["x-amz-server-side-encryption"] == "AES256"
    assert s3("GET", "/one/big").code == "NoSuchKey"
    assert s3("GET", "/one/big", {"uploadId": upload, "part-number-marker": "x"}).code == "InvalidArgument"
    numbers, sums, marker = [], [], "0"
    while marker is not None:
        reply = s3("GET", "/one/big", {"uploadId": upload, "max-parts": "2", "part-number-marker": marker})
        numbers += reply.texts("Part/PartNumber")
        sums += reply.texts("Part/ChecksumCRC32C")
        assert (reply.xml.findtext("ChecksumAlgorithm"), reply.xml.findtext("ChecksumType")) == (
            "CRC32C",
            kind,
        )
        marker = (
            reply.xml.findtext("NextPartNumberMarker")
            if reply.xml.findtext("IsTruncated") == "true"
            else None
        )
    assert (numbers, sums) == (["1", "2", "3"], [crc(data) for _, data in PARTS])
    composite = crc(b"".join(base64.b64decode(crc(data)) for _, data in PARTS)) + "-3"
    value = composite if kind == "COMPOSITE" else crc(WHOLE)
    said = {
        "x-amz-checksum-crc32c": value,
        "x-amz-checksum-type": kind,
        "x-amz-mp-object-size": str(len(WHOLE)),
    }
    reply = finish(s3, upload, PARTS, headers=said)
    etag = hashlib.md5(b"".join(hashlib.md5(data).digest() for _, data in PARTS)).hexdigest() + "-3"
    assert reply.texts("ETag") == [f'"{etag}"'] and reply.texts("ChecksumCRC32C") == [value]
    reply = s3("GET", "/one/big", headers={"x-amz-checksum-mode": "ENABLED"})
    assert (reply.body, reply.headers["x-amz-checksum-crc32c"]) == (WHOLE, value)
    assert (reply.headers["x-amz-checksum-type"], reply.headers["x-amz-meta-a"]) == (kind, "b")
    assert s3("GET", "/one/big", headers={"range": "bytes=99-250"}).body == WHOLE[99:251]
    reply = s3("HEAD", "/one/big", {"partNumber": "2"})
    assert (reply.status, reply.headers["content-length"], reply.headers["x-amz-mp-parts-count"]) == (
        206,
        "150",
        "3",
    )
    assert s3("GET", "/one/big", {"partNumber": "4"}).code == "InvalidRange"
    assert s3("GET", "/one/big", {"partNumber": "0"}).code == "InvalidArgument"
    assert s3("GET", "/one/big", headers={"x-amz-checksum-mode": "ON"}).code == "InvalidArgument"
    state = server.control("state")
    assert state["objects"]["one"]["big"]["crc32c"] == crc(WHOLE) and state["uploads"]["one"] == []
    assert finish(s3, upload, PARTS).code == "NoSuchUpload"


def test_what_complete_refuses(s3):
    upload = begin(s3, x_amz_checksum_algorithm="CRC32C", x_amz_checksum_type="FULL_OBJECT")
    for number, data in [*PARTS, (4, b"4")]:
        put_part(s3, upload, number, data)

    def code(parts, **more):
        return finish(s3, upload, parts, **more).code

    assert code([PARTS[1], PARTS[0]]) == "InvalidPartOrder"
    assert code([PARTS[0], PARTS[0]]) == "InvalidPartOrder"
    assert code([(1, b"other")]) == "InvalidPart"
    assert code([(9, b"1")]) == "InvalidPart"
    assert code([]) == "MalformedXML"
    assert code([PARTS[0], PARTS[2], (4, b"4")]) == "EntityTooSmall"
    assert code(PARTS, checksum=False) == "InvalidRequest"
    assert code(PARTS, headers={"x-amz-checksum-crc32c": crc(b"other")}) == "BadDigest"
    assert code(PARTS, headers={"x-amz-checksum-crc32c": "x"}) == "InvalidRequest"
    assert code(PARTS, headers={"x-amz-checksum-crc32": "AAAAAA=="}) == "InvalidRequest"
    assert code(PARTS, headers={"x-amz-checksum-type": "COMPOSITE"}) == "InvalidRequest"
    assert code(PARTS, headers={"x-amz-mp-object-size": "7"}) == "InvalidRequest"
    etag = hashlib.md5(PARTS[0][1]).hexdigest()
    wrong = (
        f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag><ChecksumCRC32C>AAAAAA==</ChecksumCRC32C></Part>"
    )
    for body, expected in ((wrong, "InvalidPart"), ("<Part/>", "MalformedXML"), ("<", "MalformedXML")):
        body = f"<CompleteMultipartUpload>{body}</CompleteMultipartUpload>".encode()
        assert s3("POST", "/one/big", {"uploadId": upload}, body=body).code == expected
    s3("PUT", "/one/big", body=b"there")
    assert code(PARTS, headers={"if-none-match": "*"}) == "PreconditionFailed"
    assert s3("GET", "/one/big").body == b"there"
    assert finish(s3, upload, PARTS).status == 200
    assert s3("GET", "/one/big").body == WHOLE


def test_a_composite_checksum_needs_parts_without_a_gap(s3):
    upload = begin(s3, x_amz_checksum_algorithm="CRC32C")
    for number, data in PARTS:
        put_part(s3, upload, number, data)
    reply = finish(s3, upload, [PARTS[0], PARTS[2]])
    assert (reply.status, reply.code) == (500, "InternalError")
    assert (
        finish(fresh(s3), upload, PARTS, headers={"x-amz-checksum-crc32c": "AAAAAA==-3"}).code == "BadDigest"
    )


def test_what_a_part_is_refused_for(server):
    upload = begin(fresh(server), x_amz_checksum_algorithm="CRC32C")
    plain = begin(fresh(server))

    def code(number="1", upload=upload, **headers):
        query = {"partNumber": number, "uploadId": upload}
        return fresh(server)(
            "PUT", "/one/big", query, {n.replace("_", "-"): v for n, v in headers.items()}, b"x"
        ).code

    assert code("0") == code("10001") == code("one") == "InvalidArgument"
    assert code(upload="none") == "NoSuchUpload"
    assert code() == "InvalidRequest"  # the upload was begun with a checksum, which this part does not have
    assert code(x_amz_checksum_crc32="AAAAAA==") == "InvalidRequest"
    assert code(upload=plain, x_amz_checksum_crc32c=crc(b"x")) == "InvalidRequest"
    assert code(x_amz_checksum_crc32c=crc(b"y")) == "BadDigest"
    assert code(content_md5=md5(b"y"), x_amz_checksum_crc32c=crc(b"x")) == "BadDigest"
    assert code(x_amz_server_side_encryption="AES256", x_amz_checksum_crc32c=crc(b"x")) == "InvalidArgument"
    assert code(x_amz_copy_source="/one/a", x_amz_checksum_crc32c=crc(b"x")) == "NotImplemented"
    unknown = {"x-amz-checksum-algorithm": "CRC64NVME"}
    assert fresh(server)("POST", "/one/big", {"uploads": ""}, unknown, b"").code == "NotImplemented"
    assert fresh(server)("PUT", "/one/big", {"partNumber": "1"}, body=b"").code == "InvalidArgument"
    assert put_part(fresh(server), upload, 10000, b"x").status == 200
    assert put_part(fresh(server), upload, 1, b"x", key="/one/other").code == "NoSuchUpload"
    for wrong in (
        {"x-amz-checksum-algorithm": "ADLER"},
        {"x-amz-checksum-type": "COMPOSITE"},
        {"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": "PARTLY"},
        {"x-amz-checksum-algorithm": "SHA256", "x-amz-checksum-type": "FULL_OBJECT"},
    ):
        assert fresh(server)("POST", "/one/big", {"uploads": ""}, wrong, b"").code == "InvalidRequest"


def test_uploads_are_listed_and_aborted(server, s3):
    begun = [(key, begin(s3, f"/one/{key}")) for key in ("k", "k", "l/1", "l/2")]
    planted = server.control("upload", {"bucket": "one", "key": "old", "age_s": 90000, "parts": {"1": "abc"}})
    seen, marker = [], {}
    while marker is not None:
        reply = s3("GET", "/one", {"uploads": "", "max-uploads": "1", **marker})
        seen += zip(reply.texts("Upload/Key"), reply.texts("Upload/UploadId"))
        more = reply.xml.findtext("IsTruncated") == "true"
        names = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        marker = {name: reply.xml.findtext(tag) for name, tag in names.items()} if more else None
    assert seen == [*begun, ("old", planted["upload_id"])]
    old = s3("GET", "/one", {"uploads": "", "prefix": "o"}).xml.findtext("Upload/Initiated")
    assert old < time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - 89000))
    reply = s3("GET", "/one", {"uploads": "", "delimiter": "/"})
    assert reply.texts("CommonPrefixes/Prefix") == ["l/"] and len(reply.texts("Upload/Key")) == 3
    assert s3("DELETE", "/one/k", {"uploadId": begun[0][1]}).status == 204
    assert s3("DELETE", "/one/k", {"uploadId": begun[0][1]}).code == "NoSuchUpload"
    assert put_part(fresh(server), begun[0][1], 1, b"", key="/one/k").code == "NoSuchUpload"
    assert s3("DELETE", "/one/l/1", {"uploadId": begun[3][1]}).code == "NoSuchUpload"


# Connections


def test_pipelined_requests_are_answered_in_order(server, s3):
    sock, file = raw(server)
    text = b"".join(
        head(s3, "PUT", f"/one/k{n}", b"abc") + b"abc" + head(s3, "GET", f"/one/k{n}") for n in range(20)
    )
    text += head(s3, "GET", "/one/none")
    sock.sendall(text)
    assert [answer(file)[0] for _ in range(41)] == [200] * 40 + [404]
    assert {entry["connection"] for entry in server.control("state")["log"]} == {server.last["connection"]}
    sock.close()


def test_continue_is_said_when_the_head_is_good(server, s3):
    sock, file = raw(server)
    sock.sendall(head(s3, "PUT", "/one/a", b"abc", expect="100-continue"))
    assert file.readline() == b"HTTP/1.1 100 Continue\r\n" and file.readline() == b"\r\n"
    sock.sendall(b"abc")
    assert answer(file)[0] == 200
    sock.sendall(head(s3, "PUT", "/nowhere/a", b"abc", expect="100-continue"))
    status, headers, _ = answer(file)
    assert (status, headers["connection"]) == (404, "close")
    sock.close()


def test_an_early_refusal_reaches_a_client_that_goes_on_sending(server, s3):
    body = bytes(8 << 20)
    reply = s3("PUT", "/nowhere/a", body=body)
    assert (reply.status, reply.code, reply.headers["connection"]) == (404, "NoSuchBucket", "close")


def test_an_object_that_is_replaced_while_it_is_read_stays_as_it_was(server, s3):
    size = 24 << 20  # more than the sockets' buffers hold
    s3("PUT", "/one/a", body=b"a" * size)
    sock, file = raw(server)
    sock.sendall(head(s3, "GET", "/one/a"))
    for filling in (b"b", b"c", b"d"):
        assert s3("PUT", "/one/a", body=filling * size).status == 200
    assert answer(file)[2] == b"a" * size
    sock.close()
    assert s3("GET", "/one/a").body == b"d" * size


def test_a_body_that_ends_early_leaves_nothing(server, s3):
    sock, file = raw(server)
    sock.sendall(head(s3, "PUT", "/one/a", bytes(100)) + bytes(50))
    sock.shutdown(socket.SHUT_WR)
    assert file.read() == b""
    assert server.last["status"] is None and server.last["received"] == 50
    assert server.control("state")["objects"]["one"] == {}


def test_malformed_requests_end_the_connection(server):
    for text in (
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"PUT /a HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"x" * 70000,
    ):
        sock, file = raw(server)
        sock.sendall(text)
        assert answer(file)[0] == 400 and file.read() == b""
        sock.close()
    sock, file = raw(server)
    sock.sendall(b"POST /_sts/ HTTP/1.1\r\nhost: a\r\n\r\n")
    assert answer(file)[0] == 411
    sock.close()
    # A head that ends early does not count as a request.
    count = server.control("state")["requests"]
    sock, file = raw(server)
    sock.sendall(b"GET /one/a HTTP/1.1\r\nhost: a\r\n")
    sock.shutdown(socket.SHUT_WR)
    assert file.read() == b"" and server.control("state")["requests"] == count
    sock.close()


def test_a_body_of_many_megabytes(server, s3):
    data = b"\x01\x02\x03\x04" * (3 << 20)
    value = checksums.encode(checksums.crc32c(data).to_bytes(4, "big"))
    upload = begin(s3, x_amz_checksum_algorithm="CRC32C", x_amz_checksum_type="FULL_OBJECT")
    query = {"partNumber": "1", "uploadId": upload}
    reply = s3("PUT", "/one/big", query, {"x-amz-checksum-crc32c": value, "content-md5": md5(data)}, data)
    assert reply.status == 200
    assert (
        s3(
            "PUT",
            "/one/big",
            {**query, "partNumber": "2"},
            {"x-amz-checksum-crc32c": value},
            data[:-1] + b"x",
        ).code
        == "BadDigest"
    )
    assert server.control("state")["uploads"]["one"][0]["parts"]["1"]["crc32c"] == value
    assert server.control("state")["memory"] == len(data)
    server.control("reset", {})
    assert server.control("state")["memory"] == 0


def test_crc32c_without_a_helper_is_the_same():
    for data in (b"", b"123456789", bytes(range(256)) * 5 + b"end"):
        assert checksums._crc32c_python(memoryview(data), 0) == checksums.crc32c(data)
        assert checksums.encode(checksums.crc32c(data).to_bytes(4, "big")) == crc(data)
    assert checksums.combine(checksums.crc32c(b"1234"), checksums.crc32c(b"56789"), 5) == 0xE3069283


def test_options_for_benches_and_limits():
    server = Server("--discard", "--no-md5-large", "--memory-limit", "1000000", "--log-requests", "3")
    s3, data = Client(server.port), bytes(2 << 20)
    value = checksums.encode(checksums.crc32c(data).to_bytes(4, "big"))
    assert s3("PUT", "/one/a", headers={"x-amz-checksum-crc32c": "AAAAAA=="}, body=data).code == "BadDigest"
    reply = s3("PUT", "/one/a", headers={"x-amz-checksum-crc32c": value}, body=data)
    assert reply.status == 200 and reply.headers["etag"] != f'"{hashlib.md5(data).hexdigest()}"'
    assert s3("HEAD", "/one/a").headers["content-length"] == str(len(data))
    assert s3("GET", "/one/a").status == 501
    wrong = {"x-amz-checksum-crc32c": value, "content-md5": md5(b"")}  # an MD5 that is sent is verified
    assert s3("PUT", "/one/a", headers=wrong, body=data).code == "BadDigest"
    assert Client(server.port)("PUT", "/one/b", body=bytes(1000001)).status == 507
    state = server.control("state")
    assert state["memory"] == 0 and len(state["log"]) == 3
    server.close()
    server = Server("--no-verify-large")
    s3, wrong = Client(server.port), {"x-amz-checksum-crc32c": "AAAAAA=="}
    assert s3("PUT", "/one/a", headers=wrong, body=data).status == 200
    assert s3("GET", "/one/a").body == data
    assert s3("PUT", "/one/b", headers=wrong, body=data[:1000]).code == "BadDigest"
    s3.connection.close()
    server.close()


def test_google_s_dialect():
    server = Server("--gcs", "--no-conditional")
    s3 = Client(server.port, region="auto")
    headers = {
        "x-goog-if-generation-match": "0",
        "x-goog-hash": f"crc32c={crc(b'abc')}",
        "x-goog-meta-a": "b",
    }
    reply = s3("PUT", "/one/a", headers=headers, body=b"abc", google=True)
    assert reply.status == 200, reply.body
    assert s3("PUT", "/one/a", headers=headers, body=b"abc", google=True).code == "PreconditionFailed"
    reply = s3("GET", "/one/a", google=True)
    assert reply.headers["x-goog-hash"] == f"crc32c={crc(b'abc')},md5={md5(b'abc')}"
    assert (reply.headers["x-goog-generation"], reply.headers["x-goog-meta-a"]) == ("1", "b")
    upload = s3("POST", "/one/big", {"uploads": ""}, body=b"", google=True).xml.findtext("UploadId")
    reply = s3("PUT", "/one/big", {"partNumber": "1", "uploadId": upload}, body=b"abc", google=True)
    assert reply.headers["x-goog-hash"] == f"crc32c={crc(b'abc')},md5={md5(b'abc')}"
    wrong = {"x-goog-hash": f"crc32c={crc(b'abd')}"}
    assert s3("PUT", "/one/b", headers=wrong, body=b"abc", google=True).code == "BadDigest"
    assert s3("PUT", "/one/b", headers={"x-amz-meta-a": "b"}, body=b"", google=True).code == "InvalidRequest"
    reply = s3("PUT", "/one/b", headers=headers, body=b"", google=True, unsigned=["x-goog-hash"])
    assert reply.code == "AccessDenied"
    other = fresh(server, region="auto", secret="other")
    assert other("GET", "/one/a", google=True).code == "SignatureDoesNotMatch"
    assert s3("GET", "/one/a").status == 200  # S3's signatures are also accepted
    assert s3("PUT", "/one/c", headers={"if-none-match": "*"}, body=b"").code == "NotImplemented"
    s3.connection.close()
    server.close()


def test_over_tls(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl's command is not there to make a certificate")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += [
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        key,
        "-out",
        cert,
    ]
    subprocess.run(make, check=True, capture_output=True)
    server = Server("--tls-cert", cert, "--tls-key", key)
    s3 = Client(server.port, context=ssl.create_default_context(cafile=cert))
    data = bytes(range(256)) * (12 << 10)
    assert s3("PUT", "/one/a", headers={"content-md5": md5(data)}, body=data).status == 200
    assert s3("GET", "/one/a").body == data
    s3.connection.close()
    server.close()


def test_the_port_is_told_in_a_file_and_a_wrong_fault_is_refused(tmp_path):
    server = Server("--ready-file", str(tmp_path / "ready"), "--fault", '{"kind": "status", "status": 500}')
    assert json.loads((tmp_path / "ready").read_text()) == {"port": server.port}
    assert Client(server.port)("GET", "/one/a").status == 500
    assert Client(server.port)("GET", "/one/a").status == 404
    server.process.terminate()
    assert server.process.wait(60) == 0
    command = [
        sys.executable,
        str(SERVER / "strict_s3.py"),
        "--bucket",
        "b",
        "--access-key",
        "a",
        "--secret-key",
        "s",
    ]
    for wrong in (
        "{",
        '{"kind": "flood"}',
        '{"kind": "reset", "seconds": 1}',
        '{"kind": "stall"}',
        '{"kind": "reset", "where": "up"}',
    ):
        done = subprocess.run([*command, "--fault", wrong], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "--fault" in done.stderr
