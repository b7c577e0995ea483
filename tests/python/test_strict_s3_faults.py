# SPDX-License-Identifier: Apache-2.0
"""The strict S3 server's faults, and its services that give temporary credentials."""

from __future__ import annotations

import base64
import email.utils
import http.client
import json
import time
import xml.etree.ElementTree as ElementTree

import pytest

import strict_s3_client
from strict_s3_client import REGION, answer, begin, crc, finish, fresh, head, listed, put_part, raw

# The fixtures: one server for all tests of this file, reset before each.
running, server, s3 = strict_s3_client.running, strict_s3_client.server, strict_s3_client.s3


def broken(client, *arguments, **members):
    """Checks that the request's connection ends without an answer; returns the exception."""
    with pytest.raises((ConnectionError, http.client.HTTPException)) as caught:
        client(*arguments, **members)
    return caught.value


@pytest.mark.parametrize("when", ["before_body", "after_body", "after_effect"])
def test_fault_status(server, s3, when):
    server.fault(
        "status", status=503, headers={"Retry-After": "7"}, when=when, match={"method": "PUT"}, nth=2, count=2
    )
    statuses = [s3("PUT", f"/one/{n}", body=b"abc").status for n in range(4)]
    assert statuses == [200, 503, 503, 200]
    log = server.control("state")["log"]
    assert [(entry["code"], entry["faults"]) for entry in log[1:3]] == [("SlowDown", ["status"])] * 2
    assert log[1]["received"] == (0 if when == "before_body" else 3)
    kept = {"0", "1", "2", "3"} if when == "after_effect" else {"0", "3"}
    assert set(server.control("state")["objects"]["one"]) == kept
    server.fault("status", status=429, count=0, headers={"Retry-After": "7"}, match={"key": "wan"})
    for _ in range(3):
        reply = s3("GET", "/one/wanted")
        assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "TooManyRequests", "7")
    assert s3("GET", "/one/0").status == 200


@pytest.mark.parametrize("reset", [False, True])
def test_fault_lost_ack(server, s3, reset):
    server.fault("lost_ack", reset=reset, match={"operation": "PutObject"})
    error = broken(s3, "PUT", "/one/a", headers={"if-none-match": "*"}, body=b"abc")
    assert isinstance(error, ConnectionResetError if reset else http.client.RemoteDisconnected)
    assert s3("PUT", "/one/a", headers={"if-none-match": "*"}, body=b"abc").code == "PreconditionFailed"
    assert s3("GET", "/one/a").body == b"abc"


def test_fault_reset_in_the_middle_of_a_part(server, s3):
    upload = begin(s3)
    server.fault("reset", after_bytes=1 << 20, match={"part": 1})
    broken(s3, "PUT", "/one/big", {"partNumber": "1", "uploadId": upload}, body=bytes(16 << 20))
    assert (server.last["received"], server.last["outcome"]) == (1 << 20, "fault reset")
    assert server.control("state")["uploads"]["one"][0]["parts"] == {}
    assert put_part(s3, upload, 1, b"x", checksum=False).status == 200


def test_faults_of_a_reply_s_body(server, s3):
    data = bytes(range(256)) * 8
    s3("PUT", "/one/a", headers={"x-amz-checksum-crc32c": crc(data)}, body=data)
    server.fault("reset", after_bytes=100, match={"operation": "GetObject"})
    broken(s3, "GET", "/one/a")
    server.fault("truncate", after_bytes=100, match={"operation": "GetObject"})
    error = broken(s3, "GET", "/one/a")
    assert isinstance(error, http.client.IncompleteRead) and error.partial == data[:100]
    server.fault("corrupt", offset=1000, match={"operation": "GetObject"})
    reply = s3("GET", "/one/a", headers={"x-amz-checksum-mode": "ENABLED"})
    assert [n for n in range(len(data)) if reply.body[n] != data[n]] == [1000]
    assert reply.headers["x-amz-checksum-crc32c"] == crc(data) and s3("GET", "/one/a").body == data
    server.fault("wrong_checksum", count=2)
    reply = s3("HEAD", "/one/a", headers={"x-amz-checksum-mode": "ENABLED"})
    assert reply.headers["x-amz-checksum-crc32c"] != crc(data)
    assert len(base64.b64decode(reply.headers["x-amz-checksum-crc32c"])) == 4
    assert s3("PUT", "/one/b", headers={"x-amz-checksum-crc32c": crc(b"")}, body=b"").headers[
        "x-amz-checksum-crc32c"
    ] != crc(b"")


def test_fault_stall_and_slow(server, s3):
    s3("PUT", "/one/a", body=bytes(1000))
    for kind, members in (("stall", {"seconds": 0.2}), ("slow", {"bytes_per_s": 5000})):
        server.fault(kind, match={"operation": "GetObject"}, **members)
        begun = time.monotonic()
        assert s3("GET", "/one/a").body == bytes(1000)
        assert time.monotonic() - begun >= 0.19
    server.fault("slow", bytes_per_s=5000)
    begun = time.monotonic()
    assert s3("PUT", "/one/a", body=bytes(1000)).status == 200
    assert time.monotonic() - begun >= 0.19
    # Other requests do not wait.
    server.fault("stall", seconds=60, match={"key": "stalled"})
    sock, _ = raw(server)
    sock.sendall(head(s3, "GET", "/one/stalled"))
    assert s3("GET", "/one/a").status == 200
    sock.close()


def test_fault_expire_credentials_until_a_new_one_is_set(server, s3):
    server.fault("expire_credentials", match={"key": "b"})
    assert s3("PUT", "/one/a", body=b"").status == 200
    assert s3("PUT", "/one/b", body=b"").code == "ExpiredToken"
    assert s3("PUT", "/one/a", body=b"").code == "ExpiredToken"
    made = server.control("credentials", {"mint": True})
    other = fresh(server, access=made["access_key"], secret=made["secret_key"], token=made["session_token"])
    assert other("PUT", "/one/b", body=b"").status == 200
    assert fresh(server)("GET", "/one/a").code == "ExpiredToken"


def test_fault_redirect_to_another_region(server, s3):
    server.fault("redirect", status=301, region="us-new-1", move=True)
    reply = s3("PUT", "/one/a", body=b"abc")
    assert (reply.status, reply.code, reply.headers["x-amz-bucket-region"]) == (
        301,
        "PermanentRedirect",
        "us-new-1",
    )
    assert fresh(server)("GET", "/one/a").code == "AuthorizationHeaderMalformed"
    moved = fresh(server, region="us-new-1")
    assert moved("PUT", "/one/a", body=b"abc").status == 200
    server.fault("redirect", status=307, region="us-new-1")
    reply = moved("GET", "/one/a")
    assert (reply.status, reply.code) == (307, "TemporaryRedirect")
    assert reply.headers["location"] == f"http://127.0.0.1:{server.port}/one/a"


@pytest.mark.parametrize("effect", [False, True])
def test_fault_error_in_200(server, s3, effect):
    upload = begin(s3)
    put_part(s3, upload, 1, b"x", checksum=False)
    server.fault("error_in_200", effect=effect, spaces=3)
    reply = finish(s3, upload, [(1, b"x")], checksum=False)
    assert (reply.status, reply.code, reply.headers["transfer-encoding"]) == (200, "InternalError", "chunked")
    assert b"?>\n   <Error>" in reply.body
    again = finish(s3, upload, [(1, b"x")], checksum=False)
    assert again.status == (404 if effect else 200) and s3("GET", "/one/big").body == b"x"


def test_fault_abort_upload(server, s3):
    upload = begin(s3)
    put_part(s3, upload, 1, b"x", checksum=False)
    server.fault("abort_upload", match={"operation": "CompleteMultipartUpload"})
    assert finish(s3, upload, [(1, b"x")], checksum=False).code == "NoSuchUpload"
    assert server.control("state")["uploads"]["one"] == []


def test_fault_clock_skew(server, s3):
    server.fault("clock_skew", seconds=3600)
    reply = s3("GET", "/one/a")
    assert (reply.status, reply.code) == (403, "RequestTimeTooSkewed")
    ahead = email.utils.parsedate_to_datetime(reply.headers["date"]).timestamp() - time.time()
    assert 3590 < ahead < 3610
    assert fresh(server)("GET", "/one/a", at=time.time() + 3600).code == "NoSuchKey"


def test_fault_odd_listings(server, s3):
    for name in "abc":
        s3("PUT", f"/one/{name}", body=b"")
    for mode, expected in (("duplicate", list("aabbcc")), ("empty", list("abc")), ("short", list("abc"))):
        server.fault("listing", mode=mode, count=0)
        assert listed(s3) == (expected, [])
        server.control("fault", {"clear": True})
    assert server.control("state")["requests"]["ListObjectsV2"] == 1 + 2 + 3
    server.fault("listing", mode="no_token")
    reply = s3("GET", "/one", {"list-type": "2", "max-keys": "1"})
    assert reply.xml.findtext("IsTruncated") == "true" and reply.xml.find("NextContinuationToken") is None
    token = s3("GET", "/one", {"list-type": "2", "max-keys": "1"}).xml.findtext("NextContinuationToken")
    server.fault("listing", mode="same_token")
    reply = s3("GET", "/one", {"list-type": "2", "max-keys": "1", "continuation-token": token})
    assert reply.texts("NextContinuationToken") == [token]


def test_fault_close_idle(server, s3):
    server.fault("close_idle")
    sock, file = raw(server)
    sock.sendall(head(s3, "GET", "/one/a"))
    status, headers, _ = answer(file)
    assert status == 404 and "connection" not in headers
    assert file.read() == b""
    server.fault("close_idle", when="next_request")
    sock, file = raw(server)
    sock.sendall(head(s3, "GET", "/one/a"))
    assert answer(file)[0] == 404
    sock.sendall(head(s3, "PUT", "/one/a"))
    with pytest.raises(ConnectionResetError):
        file.read(1)
    assert server.control("state")["requests"] == {"GetObject": 2}


def test_fault_refuse_continue(server, s3):
    server.fault("refuse_continue")
    sock, file = raw(server)
    sock.sendall(head(s3, "PUT", "/one/a", b"abc", expect="100-continue"))
    assert answer(file)[0] == 417
    server.fault("refuse_continue", ignore=True)
    sock, file = raw(server)
    sock.sendall(head(s3, "PUT", "/one/a", b"abc", expect="100-continue") + b"abc")
    assert answer(file)[0] == 200


# Services that give credentials


def plain(server, method, path, headers=None, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, body, headers or {})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body


def check_served(server, document, token="Token"):
    assert document["Expiration"] > time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    client = fresh(
        server, access=document["AccessKeyId"], secret=document["SecretAccessKey"], token=document[token]
    )
    assert client("HEAD", "/one").status == 200


def test_instance_metadata(server):
    ttl, path = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "/latest/meta-data/iam/security-credentials/"
    for prefix in ("/_imds", ""):
        assert plain(server, "PUT", f"{prefix}/latest/api/token")[0] == 400
        assert plain(server, "PUT", f"{prefix}/latest/api/token", {**ttl, "X-Forwarded-For": "a"})[0] == 403
        assert plain(server, "GET", prefix + path)[0] == 401
        assert plain(server, "GET", prefix + path, {"X-aws-ec2-metadata-token": "x"})[0] == 401
        status, token = plain(server, "PUT", f"{prefix}/latest/api/token", ttl)
        assert status == 200
        header = {"X-aws-ec2-metadata-token": token.decode()}
        role = plain(server, "GET", prefix + path, header)[1].decode()
        document = json.loads(plain(server, "GET", prefix + path + role, header)[1])
        assert document["Code"] == "Success"
        check_served(server, document)
    assert plain(server, "GET", "/_imds/latest/meta-data/placement/region", header)[1].decode() == REGION
    assert plain(server, "GET", "/_imds" + path + "nobody", header)[0] == 404
    # Expired credentials are replaced by new ones, unless a test sets otherwise.
    server.control("credentials", {"expire": True, "access_key": document["AccessKeyId"]})
    renewed = json.loads(plain(server, "GET", "/_imds" + path + role, header)[1])
    assert renewed["AccessKeyId"] != document["AccessKeyId"]
    check_served(server, renewed)
    server.control("credentials", {"renew": False})
    server.control(
        "credentials", {"access_key": "SET", "secret_key": "s", "session_token": "t", "expires_in_s": -5}
    )
    assert json.loads(plain(server, "GET", "/_imds" + path + role, header)[1])["AccessKeyId"] == "SET"
    server.fault("stall", seconds=0, match={"operation": "ImdsData"})
    server.fault("status", status=500, match={"operation": "ImdsToken"})
    assert plain(server, "PUT", "/_imds/latest/api/token", ttl)[0] == 500


def test_a_container_s_agent(server):
    assert plain(server, "GET", "/_container/creds")[0] == 401
    assert plain(server, "GET", "/_container/creds", {"Authorization": "other"})[0] == 401
    status, body = plain(server, "GET", "/_container/creds", {"Authorization": "container-token"})
    assert status == 200
    check_served(server, json.loads(body))


def test_sts(server):
    form = "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=arn%3Aaws%3Aiam%3A%3A000000000000%3Arole%2Fa"
    good = f"{form}&RoleSessionName=name&WebIdentityToken=web-identity-token&DurationSeconds=900"
    status, body = plain(server, "POST", "/_sts/", body=good)
    assert status == 200
    document = {
        element.tag.rpartition("}")[2]: element.text for element in ElementTree.fromstring(body).iter()
    }
    check_served(server, document, token="SessionToken")
    for old, new, code in (
        ("=web-identity", "=other", b"InvalidIdentityToken"),
        ("&RoleSessionName=name", "", b"MissingParameter"),
        ("=900", "=899", b"ValidationError"),
        ("AssumeRoleWithWebIdentity", "GetCallerIdentity", b"InvalidAction"),
    ):
        status, body = plain(server, "POST", "/_sts/", body=good.replace(old, new))
        assert status == 400 and b"<Code>" + code in body


# Connections


def test_connections_that_hang_or_are_dropped_touch_no_other(server):
    server.control("settings", {"hang_connections": 1})
    hanging, file = raw(server)
    hanging.settimeout(None)
    hanging.sendall(head(fresh(server), "GET", "/one/a"))
    assert fresh(server)("GET", "/one/a").status == 404
    server.control("reset", {})
    # The server did not read the request, so closing the connection resets it.
    with pytest.raises(ConnectionResetError):
        file.read(1)
    server.control("settings", {"drop_connections": 1})
    assert isinstance(broken(fresh(server), "GET", "/one/a"), (ConnectionError, http.client.HTTPException))
    assert fresh(server)("GET", "/one/a").status == 404
