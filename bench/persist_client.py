#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The baseline of `ropeteam-bench persist --sink s3`: parallel multipart uploads and ranged downloads by the AWS CRT
(awscrt on PyPI), between a file in memory and the server.

    persist_client.py PORT FILE CHECKSUM    CHECKSUM is crc32c or none; prints "ready"

Standard input has one command per line: `put KEY` or `get KEY [check]`. The answer is one line with its seconds. The
client exits at the end of its input. The key pair is AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
"""

import mmap
import os
import sys
import time
import zlib

from awscrt import auth, http, io, s3

REGION = "us-east-1"
BUCKET = "bench"
# These were the fastest on two cores. Tried: parts of 8, 16 and 64 MiB; 4, 8 and awscrt's default number of
# connections. Downloads were tried with files and with callbacks; callbacks were faster.
PUT_PART_BYTES = 16 << 20
GET_PART_BYTES = 8 << 20
CONNECTIONS = 8


def make_client():
    group = io.EventLoopGroup()
    bootstrap = io.ClientBootstrap(group, io.DefaultHostResolver(group))
    provider = auth.AwsCredentialsProvider.new_static(
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    )
    return s3.S3Client(
        bootstrap=bootstrap,
        region=REGION,
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        signing_config=s3.create_default_s3_signing_config(region=REGION, credential_provider=provider),
        part_size=PUT_PART_BYTES,
        max_active_connections_override=CONNECTIONS,
    )


def main() -> None:
    port, path, checksum = sys.argv[1:]
    client = make_client()
    crc32c = s3.S3ChecksumConfig(
        algorithm=s3.S3ChecksumAlgorithm.CRC32C, location=s3.S3ChecksumLocation.HEADER
    )
    with open(path, "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0))

    def request(method, key, headers):
        return http.HttpRequest(
            method, f"/{BUCKET}/{key}", http.HttpHeaders([("host", f"127.0.0.1:{port}"), *headers])
        )

    def put(key):
        return client.make_request(
            type=s3.S3RequestType.PUT_OBJECT,
            request=request("PUT", key, [("content-length", str(len(memory)))]),
            send_filepath=path,
            checksum_config=crc32c if checksum == "crc32c" else None,
        )

    def get(key, target):
        def on_body(chunk, offset, **_):
            target[offset : offset + len(chunk)] = chunk

        return client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            request=request("GET", key, []),
            part_size=GET_PART_BYTES,
            on_body=on_body,
        )

    scratch = memoryview(bytearray(b"\x01") * len(memory))
    print("ready", flush=True)
    for line in sys.stdin:
        command, key, *rest = line.split()
        begin = time.monotonic()
        transfer = put(key) if command == "put" else get(key, scratch)
        transfer.finished_future.result(300)
        print(time.monotonic() - begin, flush=True)
        if command == "get" and rest and rest[0] == "check" and zlib.crc32(scratch) != zlib.crc32(memory):
            sys.exit("other bytes came back")


if __name__ == "__main__":
    main()
