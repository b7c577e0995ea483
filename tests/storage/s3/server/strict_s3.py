#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small strict S3 for tests and benches: what S3 refuses, it refuses, with S3's codes; and it fails on demand.

    python3 strict_s3.py --port 0 --bucket b --access-key K --secret-key S [--until-stdin-closes]

The first line on its standard output is {"port": N}: from then on it listens, and answers. It needs nothing but
Python 3.11; with ISA-L (libisal2) there, CRC32C is fast.

From a C++ test: give it a pipe for standard input, another for standard output, start it with fork() and execvp()
(or posix_spawnp()) with --until-stdin-closes, and read one line of its output: the port. It ends when the write end of
its standard input is closed, so also when the test dies; SIGTERM ends it too. Then, over any HTTP client:

    http://127.0.0.1:PORT                   the endpoint, path style; BUCKET.localhost:PORT is virtual-host style
    http://127.0.0.1:PORT/_control/…        what tests look at and change: control.py; the faults: faults.py
    http://127.0.0.1:PORT/_imds/            for AWS_EC2_METADATA_SERVICE_ENDPOINT (version 2; /latest/… also at the root)
    http://127.0.0.1:PORT/_container/x      for AWS_CONTAINER_CREDENTIALS_FULL_URI, with AWS_CONTAINER_AUTHORIZATION_TOKEN
    http://127.0.0.1:PORT/_sts/             AssumeRoleWithWebIdentity

Strict means, among others: every request's Signature Version 4, its region, date and token; Content-Length, Content-MD5,
x-amz-content-sha256, x-amz-checksum-crc32c against the bytes that arrived; parts' numbers, sizes, order, ETags and
checksums; encryption headers where they belong. Streaming signatures, chunked bodies, presigned URLs, ACLs, tags, copies,
versions and CRC64NVME are refused.

For benches: --no-md5-large (ETags of bodies over 1 MiB are no MD5s, as with KMS keys; CRC32C is verified still),
--no-verify-large (only their sizes are), --discard (of such bodies only sizes and checksums are kept; reading one is 501).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading

import checksums
from faults import Fault
from service import Service

BACKLOG = 1024


def _fault(text: str) -> dict:
    try:
        spec = json.loads(text)
        Fault(spec)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return spec


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--port", type=int, default=0)
    add("--host", default="127.0.0.1")
    add("--ready-fd", type=int, help="the line with the port goes there too")
    add("--ready-file", help="and there; the file appears complete")
    add("--until-stdin-closes", action="store_true")
    add("--bucket", nargs="+", action="extend", required=True)
    add("--read-only", nargs="+", action="extend", default=[], metavar="BUCKET")
    add("--access-key", required=True)
    add("--secret-key", required=True)
    add("--session-token")
    add("--container-token", default="container-token", help="that /_container/ asks for")
    add("--web-identity-token", default="web-identity-token", help="that /_sts/ asks for")
    add("--region", default="us-east-1")
    add("--domain", default="localhost", help="BUCKET.DOMAIN is virtual-host style")
    add("--gcs", action="store_true", help="answers with x-goog-generation and x-goog-hash")
    add(
        "--no-conditional",
        action="store_true",
        help="If-None-Match and If-Match of writes: 501, as older stores",
    )
    add("--no-checksums", action="store_true", help="never heard of x-amz-checksum-…, as older stores")
    add("--part-min", type=int, default=5 << 20, metavar="BYTES", help="of a part that is not the last")
    add("--memory-limit", type=int, default=8 << 30, metavar="BYTES", help="of bodies; 507 beyond")
    add("--discard", action="store_true")
    add("--no-md5-large", action="store_true")
    add("--no-verify-large", action="store_true")
    add("--log-requests", type=int, default=1000, metavar="N", help="that /_control/state remembers")
    add("--tls-cert")
    add("--tls-key")
    add("--fault", type=_fault, action="append", default=[], metavar="JSON", help="see faults.py; repeatable")
    options = parser.parse_args(arguments)
    if bool(options.tls_cert) != bool(options.tls_key):
        parser.error("--tls-cert and --tls-key come together")
    return options


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def tell(options: argparse.Namespace, port: int) -> None:
    line = json.dumps({"port": port}) + "\n"
    print(line, end="", flush=True)
    if options.ready_fd is not None:
        os.write(options.ready_fd, line.encode())
        os.close(options.ready_fd)
    if options.ready_file:
        with open(options.ready_file + ".part", "w") as file:
            file.write(line)
        os.rename(options.ready_file + ".part", options.ready_file)


async def serve(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    service = Service(options)
    listener = listen(options.host, options.port)
    end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    if options.until_stdin_closes:

        def watch() -> None:
            while os.read(0, 4096):
                pass
            loop.call_soon_threadsafe(end.set)

        threading.Thread(target=watch, daemon=True).start()
    accepting = loop.create_task(service.accept(listener))
    if not checksums.crc32c_is_fast():
        print("strict_s3: no libisal.so.2: CRC32C of large bodies is slow", file=sys.stderr)
    tell(options, listener.getsockname()[1])
    ended = loop.create_task(end.wait())
    done, _ = await asyncio.wait({accepting, ended}, return_when=asyncio.FIRST_COMPLETED)
    if accepting in done:
        accepting.result()  # it only ever ends by an error, which is told this way


def main() -> int:
    options = parse_arguments(sys.argv[1:])
    try:
        asyncio.run(serve(options))
    except OSError as error:
        print(f"strict_s3: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
