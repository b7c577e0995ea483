#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small strict S3 server for tests and benches. It refuses what S3 refuses, with S3's codes, and fails on demand.

    python3 strict_s3.py --port 0 --bucket b --access-key K --secret-key S [--until-stdin-closes]

The first line of its standard output is {"port": N}. From then on it accepts connections. It needs Python 3.11 and
nothing else. With ISA-L (Debian's libisal2) its CRC32C is fast.

To start it from a C++ test:

1. Make two pipes, and give the server one as standard input, the other as standard output (posix_spawnp() with
   file actions). Set O_CLOEXEC on the test's own ends, or a child that inherits them keeps the server alive.
2. Pass --until-stdin-closes. The server then ends when the test closes its end, and also when the test dies.
   SIGTERM ends it too.
3. Read one line from its standard output, with a timeout. It is the port.
4. Before each test case: POST /_control/reset. After it: GET /_control/state.

Under http://127.0.0.1:PORT (https:// with --tls-cert and --tls-key) there are:

    /BUCKET/KEY         S3, path style. Virtual-host style is BUCKET.localhost:PORT (--domain)
    /_control/...       what tests look at and change (control.py), and the faults (faults.py)
    /_imds/             for AWS_EC2_METADATA_SERVICE_ENDPOINT, version 2 only; /latest/... answers at the root too
    /_container/...     for AWS_CONTAINER_CREDENTIALS_FULL_URI; the token is --container-token
    /_sts/              AssumeRoleWithWebIdentity; the token is --web-identity-token

It verifies, among others: Signature Version 4 of every request, its region, date and token; Content-Length,
Content-MD5, x-amz-content-sha256, x-amz-checksum-crc32c against the bytes that arrived; the numbers, sizes, order,
ETags and checksums of parts; encryption headers. It does not support: streaming signatures, chunked bodies, presigned
URLs, ACLs, tags, copies, versions, CRC64NVME. It says NotImplemented to those.

For benches:

    --no-md5-large      ETags of bodies over 1 MiB are no MD5s, as with KMS keys. CRC32C is still verified.
    --no-verify-large   Only the sizes of such bodies are checked.
    --discard           Of such bodies only sizes and checksums are kept. To read one is 501.
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
    add(
        "--gcs",
        action="store_true",
        help="as Google's XML API: GOOG4-HMAC-SHA256 beside S3's signatures, region auto, x-goog-hash, "
        "x-goog-generation, no x-amz-checksum-*",
    )
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
    if options.ready_fd is not None:
        os.write(options.ready_fd, line.encode())
        os.close(options.ready_fd)
    if options.ready_file:
        with open(options.ready_file + ".part", "w") as file:
            file.write(line)
        os.rename(options.ready_file + ".part", options.ready_file)
    print(line, end="", flush=True)  # last: who has read it finds the file


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
