# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over asyncio's sockets. Bodies are received into their final memory, and sent from it."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from errors import S3Error

# The request line and the headers. S3 takes 8 KiB of headers; a query may be long too.
HEAD_BYTES_MAX = 64 << 10
# One receive call: no more, so that the bytes are still in the cache when they are hashed.
CHUNK_BYTES = 1 << 20
# A connection receives so much before the others get their turn.
TURN_BYTES = 8 << 20
# After an early answer the server reads on for so long. If it closed at once, the client would get a reset and
# could lose the answer.
LINGER_S = 30.0


class Closed(Exception):
    """The connection has ended: the peer closed it, or a fault did."""


class PlainLink:
    """A connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def start(self) -> None:
        pass

    async def read_into(self, view: memoryview) -> int:
        try:
            return await self._loop.sock_recv_into(self._socket, view)
        except OSError as error:
            raise Closed(str(error)) from error

    async def write(self, data: Any) -> None:
        try:
            await self._loop.sock_sendall(self._socket, data)
        except OSError as error:
            raise Closed(str(error)) from error

    def reset(self) -> None:
        """The peer sees "connection reset"."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def linger(self) -> None:
        """Ends the sending direction, then reads and drops what the peer still sends, for LINGER_S at most."""
        scratch = memoryview(bytearray(CHUNK_BYTES))
        try:
            self._socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(LINGER_S):
                while await self._loop.sock_recv_into(self._socket, scratch):
                    pass
        except (OSError, TimeoutError):
            pass  # the connection is closed next in any case

    def close(self) -> None:
        self._socket.close()


class TlsLink(PlainLink):
    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(sock)
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=True)
        self._raw = memoryview(bytearray(CHUNK_BYTES))

    async def _drive(self, call: Callable[[], Any]) -> Any:
        while True:
            try:
                result, wants = call(), False
            except ssl.SSLWantReadError:
                result, wants = None, True
            except ssl.SSLEOFError:
                return 0
            except ssl.SSLError as error:
                raise Closed(str(error)) from error
            if self._leaving.pending:
                await super().write(self._leaving.read())
            if not wants:
                return result
            count = await super().read_into(self._raw)
            if count == 0:
                self._arrived.write_eof()
            self._arrived.write(self._raw[:count])

    async def start(self) -> None:
        await self._drive(self._tls.do_handshake)

    async def read_into(self, view: memoryview) -> int:
        count = await self._drive(lambda: self._tls.read(len(view), view))
        while 0 < count < len(view):  # a record holds 16 KiB: read all that have arrived
            try:
                more = self._tls.read(len(view) - count, view[count:])
            except ssl.SSLError:
                break  # if it is more than a lack of bytes, the next call meets it again
            if not more:
                break
            count += more
        return count

    async def write(self, data: Any) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), CHUNK_BYTES):
            await self._drive(lambda at=begin: self._tls.write(view[at : at + CHUNK_BYTES]))


@dataclass
class Request:
    method: str
    target: str  # as it came
    raw_path: str
    raw_query: str
    headers: dict[str, str]  # names in lower case; several of one name are joined by commas
    keep_alive: bool
    content_length: int | None
    chunked: bool
    connection: Any = None
    received: int = 0  # bytes of the body so far
    expects_continue: bool = False
    path: str = ""  # decoded
    query: dict[str, str] = field(default_factory=dict)
    query_pairs: list[tuple[str, str]] = field(default_factory=list)
    # Filled in by the dispatcher:
    operation: str = "Unknown"
    bucket: str = ""
    key: str = ""
    payload: str = ""  # what the signature says of the body: its SHA-256, or UNSIGNED-PAYLOAD
    google: bool = False  # signed in Google's dialect: its headers are x-goog-
    faults: Any = None

    @property
    def remaining(self) -> int:
        return (self.content_length or 0) - self.received

    async def receive(self, space: Callable[[int], memoryview], filled: Callable[[memoryview], None]) -> None:
        """Receives the whole body. `space` returns memory for at most that many bytes; `filled` gets each piece."""
        if self.chunked or (self.content_length is None and self.method in ("PUT", "POST")):
            raise S3Error("MissingContentLength")
        await self.faults.before_body(self)
        if self.expects_continue and self.remaining and not self.faults.get("refuse_continue"):
            await self.connection.link.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        turn = 0
        while self.remaining:
            view = space(self.faults.body_step(self, min(self.remaining, CHUNK_BYTES)))
            count = await self.connection.read_into(view)
            if count == 0:
                raise Closed(
                    f"the client closed the connection with {self.remaining} bytes of the body to come"
                )
            self.received += count
            filled(view[:count])
            await self.faults.during_body(self, count)
            turn += count
            if turn >= TURN_BYTES:
                turn = 0
                await asyncio.sleep(0)
        await self.faults.after_body(self)

    async def receive_bytes(self, limit: int) -> bytes:
        """A small body."""
        if (self.content_length or 0) > limit:
            raise S3Error("EntityTooLarge", ProposedSize=self.content_length, MaxSizeAllowed=limit)
        body = memoryview(bytearray(self.content_length or 0))
        await self.receive(lambda count: body[self.received : self.received + count], lambda view: None)
        return bytes(body)


@dataclass
class Response:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    segments: list[memoryview] | None = None  # in place of body
    owner: Any = None  # keeps the segments' memory from being used again
    close: bool = False
    chunks: list[bytes] | None = None  # in place of body: sent with Transfer-Encoding: chunked

    @property
    def length(self) -> int:
        if self.chunks is not None:
            return sum(map(len, self.chunks))
        return len(self.body) if self.segments is None else sum(map(len, self.segments))


REASONS = {
    200: "OK", 204: "No Content", 206: "Partial Content", 301: "Moved Permanently", 304: "Not Modified",
    307: "Temporary Redirect", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
    405: "Method Not Allowed", 409: "Conflict", 411: "Length Required", 412: "Precondition Failed",
    416: "Requested Range Not Satisfiable", 417: "Expectation Failed", 429: "Too Many Requests",
    500: "Internal Server Error", 501: "Not Implemented", 503: "Slow Down", 507: "Insufficient Storage",
}  # fmt: skip

_BAD_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def decode_percent(text: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise S3Error("InvalidURI", URI=text)
    raw = unquote_to_bytes(text.encode("utf-8", "surrogateescape"))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", URI=text) from None


class Connection:
    """Requests of one client, one after the other. Bytes behind a request's body wait for the next one."""

    def __init__(self, link: PlainLink, number: int) -> None:
        self.link = link
        self.number = number
        self._buffer = bytearray(HEAD_BYTES_MAX)
        self._view = memoryview(self._buffer)
        self._have = 0
        self._scratch: memoryview | None = None

    def scratch(self) -> memoryview:
        """Memory for bytes that are dropped."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(CHUNK_BYTES))
        return self._scratch

    async def read_into(self, view: memoryview) -> int:
        """Receives bytes of a body. Those that came together with the head are first."""
        if not self._have:
            return await self.link.read_into(view)
        count = min(self._have, len(view))
        view[:count] = self._view[:count]
        self._drop(count)
        return count

    def _drop(self, count: int) -> None:
        self._buffer[: self._have - count] = self._buffer[count : self._have]
        self._have -= count

    async def wait(self) -> bool:
        """Waits for the first bytes of the next request. False: the peer has closed."""
        if not self._have:
            self._have = await self.link.read_into(self._view)
        return self._have > 0

    async def read_request(self) -> Request | None:
        """None: the peer has closed. After an S3Error the connection must be closed."""
        while True:
            while self._have >= 2 and self._buffer.startswith(b"\r\n"):
                self._drop(2)
            end = self._buffer.find(b"\r\n\r\n", 0, self._have)
            if end >= 0:
                break
            if self._have == len(self._buffer):
                raise S3Error("RequestHeaderSectionTooLarge", MaxSizeAllowed=HEAD_BYTES_MAX)
            count = await self.link.read_into(self._view[self._have :])
            if count == 0:
                if self._have:
                    raise Closed("the client closed the connection within a request's head")
                return None
            self._have += count
        head = bytes(self._view[:end]).decode("utf-8", "surrogateescape")
        self._drop(end + 4)
        request = parse_head(head)
        request.connection = self
        return request


def parse_head(head: str) -> Request:
    lines = head.split("\r\n")
    first = lines[0].split(" ")
    if len(first) != 3 or first[2] not in ("HTTP/1.1", "HTTP/1.0") or not first[1].startswith("/"):
        raise S3Error("BadRequest", f"malformed request line {lines[0]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or "\n" in value or "\0" in value:
            raise S3Error("BadRequest", f"malformed header {line!r}")
        name, value = name.lower(), value.strip(" \t")
        if name in headers and name in ("host", "content-length", "authorization"):
            raise S3Error("BadRequest", f"header {name} twice")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    if "host" not in headers:
        raise S3Error("BadRequest", "no Host header")
    length = headers.get("content-length")
    if length is not None and not re.fullmatch("[0-9]{1,18}", length):
        raise S3Error("BadRequest", f"malformed Content-Length {length!r}")
    raw_path, _, raw_query = first[1].partition("?")
    connection = headers.get("connection", "").lower()
    return Request(
        method=first[0],
        target=first[1],
        raw_path=raw_path,
        raw_query=raw_query,
        headers=headers,
        keep_alive="close" not in connection and (first[2] == "HTTP/1.1" or "keep-alive" in connection),
        content_length=None if length is None else int(length),
        chunked="transfer-encoding" in headers,
        expects_continue=headers.get("expect", "").lower() == "100-continue",
    )


def decode_target(request: Request) -> None:
    """Fills in path and query. The connection survives its errors, other than those of parse_head()."""
    request.path = decode_percent(request.raw_path)
    for pair in filter(None, request.raw_query.split("&")):
        name, _, value = pair.partition("=")
        request.query_pairs.append(tuple(decode_percent(text.replace("+", " ")) for text in (name, value)))
    request.query = dict(request.query_pairs)


async def send_response(request: Request, response: Response, faults: Any) -> int:
    """Returns how many bytes of the body were sent."""
    link = request.connection.link
    reason = REASONS.get(response.status, "Unknown")
    lines = [f"HTTP/1.1 {response.status} {reason}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if response.chunks is not None:
        lines.append("Transfer-Encoding: chunked")
    elif response.status not in (204, 304) and "Content-Length" not in response.headers:
        lines.append(f"Content-Length: {response.length}")
    if response.close:
        lines.append("Connection: close")
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")
    if request.method == "HEAD" or response.status in (204, 304):
        await link.write(head)
        return 0
    if response.chunks is not None:
        await link.write(head)
        for chunk in response.chunks:
            await link.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        await link.write(b"0\r\n\r\n")
        return response.length
    segments = [memoryview(response.body)] if response.segments is None else response.segments
    if faults is not None and faults.shapes_reply():
        await link.write(head)
        return await faults.send_body(link, segments)
    if response.length < CHUNK_BYTES:
        await link.write(b"".join([head, *segments]))
        return response.length
    await link.write(head)
    for segment in segments:
        await link.write(segment)
    return response.length


def http_date(at: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(at))


def iso_date(at: float) -> str:
    """As in S3's listings, with milliseconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at * 1000) % 1000:03d}Z"
