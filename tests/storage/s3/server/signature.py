# SPDX-License-Identifier: Apache-2.0
"""Verifies S3's Signature Version 4. Written from its description, independently of the product's signer."""

from __future__ import annotations

import calendar
import email.utils
import hashlib
import hmac
import re
import time
from dataclasses import dataclass
from urllib.parse import quote

from credentials import Credential, Credentials
from errors import S3Error
from http1 import Request

SKEW_S_MAX = 900  # S3's: 15 minutes, either way
UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Dialect:
    """The two spellings of one scheme."""

    algorithm: str
    key_prefix: str
    service: str
    terminal: str
    headers: str  # what its own headers begin with


AMAZON = Dialect("AWS4-HMAC-SHA256", "AWS4", "s3", "aws4_request", "x-amz-")
GOOGLE = Dialect("GOOG4-HMAC-SHA256", "GOOG4", "storage", "goog4_request", "x-goog-")


@dataclass
class Authorization:
    dialect: Dialect
    access_key: str
    date: str
    region: str
    service: str
    terminal: str
    signed_headers: list[str]
    signature: str


def parse_authorization(header: str, gcs: bool = False) -> Authorization:
    def malformed(what: str) -> S3Error:
        return S3Error("AuthorizationHeaderMalformed", f"The authorization header is malformed; {what}")

    algorithm, _, rest = header.partition(" ")
    dialect = GOOGLE if gcs and algorithm == GOOGLE.algorithm else AMAZON
    if algorithm != dialect.algorithm:
        raise S3Error(
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256.",
        )
    fields: dict[str, str] = {}
    for item in rest.split(","):
        name, equals, value = item.strip().partition("=")
        if not equals or name in fields:
            raise malformed(f"cannot parse {item.strip()!r}.")
        fields[name] = value
    if set(fields) != {"Credential", "SignedHeaders", "Signature"}:
        raise malformed("it needs Credential, SignedHeaders and Signature, each once.")
    scope = fields["Credential"].rsplit("/", 4)
    if len(scope) != 5 or not scope[0]:
        raise malformed(
            'the Credential is mal-formed; expecting "<YOUR-AKID>/YYYYMMDD/REGION/SERVICE/aws4_request".'
        )
    if not re.fullmatch("[0-9]{8}", scope[1]):
        raise malformed(
            f'incorrect date format "{scope[1]}". This date in the credential must be in the format "yyyyMMdd".'
        )
    if scope[3] != dialect.service:
        raise malformed(f'incorrect service "{scope[3]}". This endpoint belongs to "{dialect.service}".')
    if scope[4] != dialect.terminal:
        raise malformed(f'incorrect terminal "{scope[4]}". This endpoint uses "{dialect.terminal}".')
    signed = fields["SignedHeaders"].split(";")
    if signed != sorted(set(signed)) or any(name != name.lower() or not name for name in signed):
        raise malformed("SignedHeaders must be in lower case and sorted, each once.")
    if not re.fullmatch("[0-9a-f]{64}", fields["Signature"]):
        raise malformed("the Signature must be 64 hexadecimal digits in lower case.")
    return Authorization(dialect, *scope, signed, fields["Signature"])


def request_time(headers: dict[str, str], dialect: Dialect) -> tuple[str, int]:
    """The signature's time stamp, and the same as seconds."""
    stamp = headers.get(dialect.headers + "date")
    try:
        if stamp is None:
            parsed = email.utils.parsedate_to_datetime(headers["date"])
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(parsed.timestamp()))
        return stamp, calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
    except (KeyError, TypeError, ValueError):
        raise S3Error(
            "AccessDenied", "AWS authentication requires a valid Date or x-amz-date header"
        ) from None


def payload_hash(headers: dict[str, str], dialect: Dialect) -> str:
    value = headers.get(dialect.headers + "content-sha256")
    if value is None and dialect is GOOGLE:
        return UNSIGNED
    if value is None:
        raise S3Error("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    if value.startswith("STREAMING-"):
        raise S3Error("NotImplemented", Header="x-amz-content-sha256", AdditionalMessage=value)
    if value != UNSIGNED and not re.fullmatch("[0-9a-f]{64}", value):
        raise S3Error(
            "InvalidArgument",
            f"x-amz-content-sha256 must be {UNSIGNED}, or a valid sha256 value.",
            ArgumentName="x-amz-content-sha256",
            ArgumentValue=value,
        )
    return value


def uri_encode(text: str, safe: str) -> str:
    return quote(text.encode("utf-8", "surrogateescape"), safe=safe + "-._~")


def canonical_request(request: Request, signed_headers: list[str], payload: str) -> str:
    pairs = sorted((uri_encode(name, ""), uri_encode(value, "")) for name, value in request.query_pairs)
    lines = [request.method, uri_encode(request.path, "/"), "&".join(f"{n}={v}" for n, v in pairs)]
    lines += [f"{name}:{' '.join(request.headers.get(name, '').split())}" for name in signed_headers]
    return "\n".join([*lines, "", ";".join(signed_headers), payload])


def signing_key(secret: str, date: str, region: str, dialect: Dialect = AMAZON) -> bytes:
    key = (dialect.key_prefix + secret).encode()
    for part in (date, region, dialect.service, dialect.terminal):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def check_scope(authorization: Authorization, stamp: str, regions: list[str]) -> None:
    if authorization.date != stamp[:8]:
        raise S3Error(
            "AuthorizationHeaderMalformed",
            f'The authorization header is malformed; Invalid credential date "{authorization.date}". This date is not '
            f'the same as X-Amz-Date: "{stamp[:8]}".',
        )
    region = regions[0]
    if authorization.region not in regions:
        raise S3Error(
            "AuthorizationHeaderMalformed",
            f"The authorization header is malformed; the region '{authorization.region}' is wrong; expecting "
            f"'{region}'",
            headers={"x-amz-bucket-region": region},
            Region=region,
        )


def check_time(stamp: str, at: int, now: float) -> None:
    if abs(at - now) > SKEW_S_MAX:
        raise S3Error(
            "RequestTimeTooSkewed",
            RequestTime=stamp,
            ServerTime=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
            MaxAllowedSkewMilliseconds=SKEW_S_MAX * 1000,
        )


def check_token(credential: Credential, token: str | None, now: float) -> None:
    if credential.token is not None and token is None:
        raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=credential.access_key)
    if credential.token != token:
        raise S3Error("InvalidToken", Token_0=token)
    if credential.expires is not None and now >= credential.expires:
        raise S3Error("ExpiredToken", Token_0=token)


def verify(request: Request, credentials: Credentials, regions: list[str], now: float, gcs: bool) -> None:
    """Verifies the request's head, and sets its `payload` and `google`.

    `regions`: those that a scope may name, the server's own first. `gcs`: accept Google's dialect too.
    """
    headers = request.headers
    if "X-Amz-Signature" in request.query:
        raise S3Error("NotImplemented", "Presigned URLs are not implemented.")
    if "authorization" not in headers:
        raise S3Error("AccessDenied")
    authorization = parse_authorization(headers["authorization"], gcs)
    dialect = authorization.dialect
    if dialect is GOOGLE and any(name.startswith(AMAZON.headers) for name in headers):
        raise S3Error("InvalidRequest", "A request cannot have both x-goog- and x-amz- headers.")
    payload = payload_hash(headers, dialect)
    stamp, at = request_time(headers, dialect)
    credential = credentials.find(authorization.access_key)
    if credential is None:
        raise S3Error("InvalidAccessKeyId", AWSAccessKeyId=authorization.access_key)
    check_scope(authorization, stamp, regions)
    check_time(stamp, at, now)
    check_token(credential, headers.get(dialect.headers + "security-token"), now)
    must = {name for name in headers if name.startswith(dialect.headers)} | {"host"}
    unsigned = sorted(must - set(authorization.signed_headers))
    if unsigned:
        raise S3Error(
            "AccessDenied",
            "There were headers present in the request which were not signed",
            HeadersNotSigned=", ".join(unsigned),
        )
    canonical = canonical_request(request, authorization.signed_headers, payload).encode(
        "utf-8", "surrogateescape"
    )
    scope = f"{authorization.date}/{authorization.region}/{dialect.service}/{dialect.terminal}"
    to_sign = f"{dialect.algorithm}\n{stamp}\n{scope}\n{hashlib.sha256(canonical).hexdigest()}"
    key = signing_key(credential.secret, authorization.date, authorization.region, dialect)
    if not hmac.compare_digest(hmac.digest(key, to_sign.encode(), "sha256").hex(), authorization.signature):
        raise S3Error(
            "SignatureDoesNotMatch",
            AWSAccessKeyId=authorization.access_key,
            StringToSign=to_sign,
            SignatureProvided=authorization.signature,
            StringToSignBytes=to_sign.encode().hex(" "),
            CanonicalRequest=canonical.decode("utf-8", "replace"),
            CanonicalRequestBytes=canonical.hex(" "),
        )
    request.payload, request.google = payload, dialect is GOOGLE
