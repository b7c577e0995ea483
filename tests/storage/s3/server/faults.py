# SPDX-License-Identifier: Apache-2.0
"""Faults that tests set. Each fires for the requests that it matches; the log says which faults a request met.

A fault is a JSON object: "kind", "match", "nth", "count", and the members of its kind.

match   any of "method", "operation" (its name in /_control/state), "bucket", "key" (a part of it), "query" (a
        parameter's name), "header" (a header's name), "part" (a part's number)
nth     the first matching request that it fires for; 1
count   for how many requests it fires; 1. 0: for all that follow
when    "before_body" (the default: the body is not read), "after_body" (read, without effect), "after_effect"

status              an error: "status": 503, "code", "message", "headers": {"Retry-After": "1"}, "when", "close"
stall               no answer for "seconds", then on as usual; "when"
lost_ack            done, but the connection is closed, or with "reset": true reset, in place of the answer
reset               the connection is reset after "after_bytes" of the body; "where": "request" or "reply". By
                    default it is the request's body for PUT and POST, the reply's for all others
slow                a body at "bytes_per_s"; "where"
truncate            the reply's body ends after "after_bytes"; its Content-Length says more
corrupt             the lowest bit of the reply's byte at "offset" is flipped
wrong_checksum      x-amz-checksum-* and x-goog-hash of the reply are wrong, and so is ChecksumCRC32C in its XML
error_in_200        CompleteMultipartUpload answers 200 with an error for a body: "code"; "effect": true: it was
                    done all the same; "spaces": how many of them come before the error
abort_upload        somebody else aborts the upload of this request, just before it
expire_credentials  the request's key has expired from now on; with "all": true, every key has
redirect            "status": 301 or 307, "region", "location"; "move": true: the server has that region then
clock_skew          the server's clock is "seconds" ahead from now on
listing             "mode": "duplicate": each entry comes twice; "empty": the first page has no entry; "short": pages
                    of one entry; "same_token": the token does not change; "no_token": more, but no token
close_idle          the connection is closed "after_s" (0) seconds after an answer that does not announce it; with
                    "when": "next_request", it is reset when the next request arrives, which is not read
refuse_continue     417 to "Expect: 100-continue"; with "ignore": true, no answer to it: the body is awaited
"""

from __future__ import annotations

import asyncio
from typing import Any

from errors import S3Error
from http1 import Closed, PlainLink, Request, Response

# Members of each kind, beside kind, match, nth and count.
KINDS: dict[str, set[str]] = {
    "status": {"status", "code", "message", "headers", "when", "close"},
    "stall": {"seconds", "when"},
    "lost_ack": {"reset"},
    "reset": {"after_bytes", "where"},
    "slow": {"bytes_per_s", "where"},
    "truncate": {"after_bytes"},
    "corrupt": {"offset"},
    "wrong_checksum": set(),
    "error_in_200": {"code", "effect", "spaces"},
    "abort_upload": set(),
    "expire_credentials": {"all"},
    "redirect": {"status", "region", "location", "move"},
    "clock_skew": {"seconds"},
    "listing": {"mode"},
    "close_idle": {"after_s", "when"},
    "refuse_continue": {"ignore"},
}
CHOICES = {
    "where": {"request", "reply"},
    "when": {"before_body", "after_body", "after_effect", "after_reply", "next_request"},
    "mode": {"duplicate", "empty", "short", "same_token", "no_token"},
}
NEEDED = {
    "stall": "seconds",
    "slow": "bytes_per_s",
    "clock_skew": "seconds",
    "listing": "mode",
    "redirect": "region",
}
MATCHES = {"method", "operation", "bucket", "key", "query", "header", "part"}
SLOW_PIECES_PER_S = 20  # pieces of a slow body
CODE_OF_STATUS = {
    403: "AccessDenied",
    409: "ConditionalRequestConflict",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


class Fault:
    def __init__(self, spec: Any) -> None:
        if not isinstance(spec, dict) or spec.get("kind") not in KINDS:
            raise ValueError(f"fault: kind must be one of {', '.join(sorted(KINDS))}")
        self.kind: str = spec["kind"]
        unknown = set(spec) - KINDS[self.kind] - {"kind", "match", "nth", "count"}
        unknown |= {f"match.{name}" for name in set(spec.get("match", {})) - MATCHES}
        if unknown:
            raise ValueError(f"fault {self.kind}: unknown {', '.join(sorted(unknown))}")
        if self.kind in NEEDED and NEEDED[self.kind] not in spec:
            raise ValueError(f"fault {self.kind}: needs {NEEDED[self.kind]}")
        for name, choices in CHOICES.items():
            if name in spec and spec[name] not in choices:
                raise ValueError(f"fault {self.kind}: {name} must be one of {', '.join(sorted(choices))}")
        self.spec: dict[str, Any] = spec
        self.seen = 0
        self.fired = 0

    def _matches(self, request: Request) -> bool:
        match = self.spec.get("match", {})
        exact = {"method": request.method, "operation": request.operation, "bucket": request.bucket}
        return (
            all(match[name] == value for name, value in exact.items() if name in match)
            and match.get("key", "") in request.key
            and ("query" not in match or match["query"] in request.query)
            and ("header" not in match or match["header"].lower() in request.headers)
            and ("part" not in match or request.query.get("partNumber") == str(match["part"]))
        )

    def fires(self, request: Request) -> bool:
        if not self._matches(request):
            return False
        self.seen += 1
        count = self.spec.get("count", 1)
        if self.seen < self.spec.get("nth", 1) or (count and self.fired >= count):
            return False
        self.fired += 1
        return True


class Faults:
    def __init__(self) -> None:
        self.known: list[Fault] = []

    def add(self, spec: Any) -> None:
        self.known.append(Fault(spec))

    def take(self, request: Request) -> Fired:
        return Fired(
            [fault for fault in self.known if fault.fires(request)] if self.known else [], request.method
        )


class Fired:
    """The faults that one request meets, at the points where it meets them."""

    def __init__(self, faults: list[Fault], method: str) -> None:
        self._specs = {fault.kind: fault.spec for fault in faults}
        self._data = "request" if method in ("PUT", "POST") else "reply"
        self._passed: set[str] = set()

    @property
    def kinds(self) -> list[str]:
        return sorted(self._specs)

    def get(self, kind: str) -> dict[str, Any] | None:
        return self._specs.get(kind)

    def _at(self, kind: str, where: str) -> dict[str, Any] | None:
        """The fault, if it concerns this direction."""
        spec = self._specs.get(kind)
        return spec if spec is not None and spec.get("where", self._data) == where else None

    async def _pass(self, stage: str) -> None:
        """Applies the faults of a stage, once."""
        if stage in self._passed or not self._specs:
            return
        self._passed.add(stage)
        stall = self._specs.get("stall")
        if stall is not None and stall.get("when", "before_body") == stage:
            await asyncio.sleep(float(stall["seconds"]))
        status = self._specs.get("status")
        if status is not None and status.get("when", "before_body") == stage:
            number = int(status.get("status", 503))
            code = status.get("code", CODE_OF_STATUS.get(number, "ServiceUnavailable"))
            raise S3Error(code, status.get("message"), number, status.get("headers"))

    def at_head(self, request: Request) -> None:
        """Applies the faults that need only the request's head."""
        refuse = self._specs.get("refuse_continue")
        if refuse is not None and request.expects_continue and not refuse.get("ignore"):
            raise S3Error("ExpectationFailed")
        redirect = self._specs.get("redirect")
        if redirect is not None:
            status = int(redirect.get("status", 301))
            headers = {"x-amz-bucket-region": redirect["region"]}
            if status == 307 or "location" in redirect:
                headers["Location"] = redirect.get(
                    "location", f"http://{request.headers['host']}{request.target}"
                )
            raise S3Error(
                "TemporaryRedirect" if status == 307 else "PermanentRedirect",
                status=status,
                headers=headers,
                Bucket=request.bucket,
                Endpoint=f"s3.{redirect['region']}.amazonaws.com",
            )

    async def before_body(self, request: Request) -> None:
        await self._pass("before_body")
        if self._at("reset", "request") and not request.remaining:
            self._reset(request.connection.link)

    def body_step(self, request: Request, count: int) -> int:
        """How many bytes of the body to take at once."""
        reset = self._at("reset", "request")
        if reset is not None:
            count = min(count, max(1, int(reset.get("after_bytes", 0)) - request.received))
        slow = self._at("slow", "request")
        if slow is not None:
            count = min(count, max(1, int(slow["bytes_per_s"]) // SLOW_PIECES_PER_S))
        return count

    async def during_body(self, request: Request, count: int) -> None:
        if not self._specs:
            return
        reset = self._at("reset", "request")
        if reset is not None and request.received >= int(reset.get("after_bytes", 0)):
            self._reset(request.connection.link)
        slow = self._at("slow", "request")
        if slow is not None:
            await asyncio.sleep(count / float(slow["bytes_per_s"]))

    async def after_body(self, request: Request) -> None:
        await self._pass("after_body")

    async def after_effect(self, request: Request) -> None:
        await self._pass("after_effect")
        lost = self._specs.get("lost_ack")
        if lost is not None:
            if lost.get("reset"):
                self._reset(request.connection.link)
            raise Closed("fault lost_ack")

    @staticmethod
    def _reset(link: PlainLink) -> None:
        link.reset()
        raise Closed("fault reset")

    def change_reply(self, request: Request, response: Response) -> None:
        """Changes the reply of an operation that was done."""
        if "wrong_checksum" in self._specs:
            for name, value in response.headers.items():
                if (
                    name.startswith("x-amz-checksum-")
                    and name != "x-amz-checksum-type"
                    or name == "x-goog-hash"
                ):
                    response.headers[name] = _other_checksum(value)
            opening = b"<ChecksumCRC32C>"
            at = response.body.find(opening)
            if at >= 0:
                at += len(opening)
                first = b"B" if response.body[at : at + 1] == b"A" else b"A"
                response.body = response.body[:at] + first + response.body[at + 1 :]
        status = self._specs.get("status")
        if status is not None and status.get("close"):
            response.close = True

    def shapes_reply(self) -> bool:
        return any(
            kind in ("truncate", "corrupt") or (kind in ("reset", "slow") and self._at(kind, "reply"))
            for kind in self._specs
        )

    async def send_body(self, link: PlainLink, segments: list[memoryview]) -> int:
        """Sends a reply's body with truncate, corrupt, reset and slow applied. Returns the bytes sent."""
        cut, reset = self._specs.get("truncate"), self._at("reset", "reply")
        ends = [int(spec.get("after_bytes", 0)) for spec in (cut, reset) if spec is not None]
        end = min(ends) if ends else None
        corrupt, slow = self._specs.get("corrupt"), self._at("slow", "reply")
        rate = float(slow["bytes_per_s"]) if slow is not None else None
        step = max(1, int(rate / SLOW_PIECES_PER_S)) if rate is not None else 1 << 20
        sent = 0
        for segment in segments:
            if end is not None and sent >= end:
                break
            for begin in range(0, len(segment), step):
                piece: Any = segment[begin : begin + step]
                if corrupt is not None and sent <= (offset := int(corrupt.get("offset", 0))) < sent + len(
                    piece
                ):
                    piece = bytearray(piece)
                    piece[offset - sent] ^= 1
                if end is not None:
                    piece = piece[: end - sent]
                if rate is not None:
                    await asyncio.sleep(len(piece) / rate)
                await link.write(piece)
                sent += len(piece)
                if end is not None and sent >= end:
                    break
        if reset is not None:
            self._reset(link)
        if cut is not None:
            raise Closed("fault truncate")
        return sent


def _other_checksum(value: str) -> str:
    """Well-formed and of the same length, with another first digit."""
    prefix = "crc32c=" if value.startswith("crc32c=") else ""
    digits = value[len(prefix) :]
    return prefix + ("B" if digits[:1] == "A" else "A") + digits[1:]
