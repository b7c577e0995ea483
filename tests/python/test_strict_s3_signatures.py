# SPDX-License-Identifier: Apache-2.0
"""The strict S3 server's authentication: signatures, session tokens, signed payloads."""

from __future__ import annotations

import hashlib
import hmac
import time

import strict_s3_client
from strict_s3_client import ACCESS, EMPTY, REGION, fresh, head

# The fixtures: one server for all tests of this file, reset before each.
running, server, s3 = strict_s3_client.running, strict_s3_client.server, strict_s3_client.s3


def test_a_signed_request_is_accepted_whatever_the_key(s3):
    for key in ("plain", "a b/ü+%&=?;:@.txt", "x/~tilde*()'!$,", "dir//double", "nl\n\x01", "."):
        assert s3("PUT", f"/one/{key}", headers={"x-amz-meta-a": "two  blanks "}, body=b"x").status == 200
        assert s3("GET", f"/one/{key}").body == b"x"
    assert s3("GET", "/one", {"list-type": "2", "prefix": "a b/ü+%&", "delimiter": "/"}).texts(
        "Contents/Key"
    ) == ["a b/ü+%&=?;:@.txt"]


def test_the_published_example_has_the_published_signature():
    """The server's own functions with "GET Object" of Amazon's examples for S3's Signature Version 4."""
    import http1
    import signature

    head = (
        "GET /test.txt HTTP/1.1\r\nHost: examplebucket.s3.amazonaws.com\r\nRange: bytes=0-9\r\n"
        f"x-amz-content-sha256: {EMPTY}\r\nx-amz-date: 20130524T000000Z"
    )
    request = http1.parse_head(head)
    http1.decode_target(request)
    names = ["host", "range", "x-amz-content-sha256", "x-amz-date"]
    canonical = signature.canonical_request(request, names, EMPTY)
    to_sign = "AWS4-HMAC-SHA256\n20130524T000000Z\n20130524/us-east-1/s3/aws4_request\n"
    to_sign += hashlib.sha256(canonical.encode()).hexdigest()
    key = signature.signing_key("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "20130524", "us-east-1")
    expected = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    assert hmac.digest(key, to_sign.encode(), "sha256").hex() == expected


def test_a_wrong_signature_is_told_with_what_was_signed(server):
    reply = fresh(server, secret="other")("GET", "/one/x", {"b": "2", "a": "1"})
    assert (reply.status, reply.code) == (403, "SignatureDoesNotMatch")
    assert reply.xml.findtext("CanonicalRequest").startswith("GET\n/one/x\na=1&b=2\nhost:127.0.0.1:")
    assert f"/{REGION}/s3/aws4_request" in reply.xml.findtext("StringToSign")
    assert reply.headers["x-amz-request-id"] == reply.xml.findtext("RequestId")
    assert "date" in reply.headers and "x-amz-id-2" in reply.headers


def test_a_changed_request_is_refused(server):
    for change in ({"target": "/one/y"}, {"target": "/one/x?a=1"}, {"target": "/one/x?prefix=a+c"}):
        assert fresh(server)("GET", "/one/x", **change).code == "SignatureDoesNotMatch"
    # A plus sign in a query is a space, as S3 reads it.
    query = {"list-type": "2", "prefix": "a b"}
    assert fresh(server)("GET", "/one", query, target="/one?list-type=2&prefix=a+b").status == 200
    assert fresh(server)("GET", "/one", query, target="/one?prefix=a%20b&list-type=2").status == 200
    for target in ("/one/%zz", "/one/%ff"):
        assert fresh(server)("GET", "/one/x", target=target).code == "InvalidURI"


def test_each_wrong_authorization_has_its_code(server):
    def code(client=None, **change):
        reply = (client or fresh(server))("GET", "/one/x", **change)
        return reply.status, reply.code

    now = time.time()
    assert code(without=["authorization"]) == (403, "AccessDenied")
    assert code(authorization="AWS AK:sig") == code(google=True) == (400, "InvalidRequest")
    assert code(authorization="AWS4-HMAC-SHA256 Credential=x") == (400, "AuthorizationHeaderMalformed")
    assert code(fresh(server, access="nobody")) == (403, "InvalidAccessKeyId")
    assert code(service="ec2") == (400, "AuthorizationHeaderMalformed")
    assert code(date="20200101") == (400, "AuthorizationHeaderMalformed")
    assert code(at=now - 1000) == (403, "RequestTimeTooSkewed")
    assert code(at=now + 1000) == (403, "RequestTimeTooSkewed")
    assert code(at=now - 800)[0] == 404
    assert code(stamp="yesterday", date="20200101") == (403, "AccessDenied")
    assert code(headers={"x-amz-meta-a": "1"}, unsigned=["x-amz-meta-a"]) == (403, "AccessDenied")
    assert code(unsigned=["host"]) == (403, "AccessDenied")
    assert code(without=["x-amz-content-sha256"]) == (400, "InvalidRequest")
    assert code(payload="abc") == (400, "InvalidArgument")
    assert code(payload="STREAMING-UNSIGNED-PAYLOAD-TRAILER") == (501, "NotImplemented")
    assert code(payload="0" * 64) == (400, "XAmzContentSHA256Mismatch")
    assert code(fresh(server, token="unasked")) == (400, "InvalidToken")
    assert fresh(server)("GET", "/one/x", payload=EMPTY).status == 404


def test_a_malformed_authorization_says_what_is_wrong(server):
    good = {
        "Credential": f"{ACCESS}/20200101/{REGION}/s3/aws4_request",
        "SignedHeaders": "host;x-amz-content-sha256;x-amz-date",
        "Signature": "0" * 64,
    }
    for name, value, message in (
        ("Signature", None, "each once"),
        ("Credential", ACCESS, "mal-formed"),
        ("Credential", f"{ACCESS}/1 May/{REGION}/s3/aws4_request", "incorrect date format"),
        ("Credential", f"{ACCESS}/20200101/{REGION}/s3/aws3_request", "incorrect terminal"),
        ("SignedHeaders", "x-amz-date;host", "sorted"),
        ("SignedHeaders", "Host;x-amz-date", "lower case"),
        ("Signature", "F" * 64, "hexadecimal"),
        ("Signature", "0" * 64 + ",Signature", "cannot parse"),
        ("Signature", "0" * 64, "Invalid credential date"),
    ):
        parts = {**good, name: value}
        text = ",".join(f"{part}={content}" for part, content in parts.items() if content is not None)
        reply = fresh(server)("GET", "/one/x", authorization=f"AWS4-HMAC-SHA256 {text}")
        assert reply.code == "AuthorizationHeaderMalformed"
        assert message in reply.xml.findtext("Message")


def test_a_wrong_region_is_told_the_right_one(server):
    reply = fresh(server, region="us-west-2")("GET", "/one/x")
    assert (reply.status, reply.code) == (400, "AuthorizationHeaderMalformed")
    assert reply.xml.findtext("Region") == reply.headers["x-amz-bucket-region"] == REGION
    reply = fresh(server, region="us-west-2")("HEAD", "/one")
    assert (reply.status, reply.headers["x-amz-bucket-region"], reply.body) == (400, REGION, b"")


def test_session_tokens_are_asked_for_and_expire(server):
    server.control(
        "credentials", {"access_key": "T", "secret_key": "s", "session_token": "tok", "expires_in_s": 900}
    )
    assert fresh(server, access="T", secret="s", token="tok")("HEAD", "/one").status == 200
    assert fresh(server, access="T", secret="s")("GET", "/one/x").code == "InvalidAccessKeyId"
    assert fresh(server, access="T", secret="s", token="no")("GET", "/one/x").code == "InvalidToken"
    server.control(
        "credentials", {"access_key": "T", "secret_key": "s", "session_token": "tok", "expires_in_s": -1}
    )
    reply = fresh(server, access="T", secret="s", token="tok")("GET", "/one/x")
    assert (reply.status, reply.code) == (400, "ExpiredToken")


def test_a_signed_payload_is_verified(s3):
    data = b"some bytes"
    assert s3("PUT", "/one/a", body=data, payload=hashlib.sha256(data).hexdigest()).status == 200
    reply = s3("PUT", "/one/b", body=b"other bytes", payload=hashlib.sha256(data).hexdigest())
    assert (reply.status, reply.code) == (400, "XAmzContentSHA256Mismatch")
    assert s3("GET", "/one/b").code == "NoSuchKey"
