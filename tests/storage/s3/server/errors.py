# SPDX-License-Identifier: Apache-2.0
"""S3's error codes with their HTTP status, and XML as S3 writes it."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"

# code: (HTTP status, S3's own message)
CODES: dict[str, tuple[int, str]] = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header is malformed."),
    "BadDigest": (400, "The Content-MD5 you specified did not match what we received."),
    "BadRequest": (400, "Bad Request"),
    "ConditionalRequestConflict": (
        409,
        "The conditional request cannot succeed due to a conflicting operation against this resource.",
    ),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed size"),
    "EntityTooSmall": (400, "Your proposed upload is smaller than the minimum allowed size"),
    "ExpectationFailed": (417, "Expectation Failed"),
    "ExpiredToken": (400, "The provided token has expired."),
    "IllegalLocationConstraintException": (400, "The location constraint is incompatible for the endpoint."),
    "InsufficientStorage": (507, "The server's memory limit is reached (--memory-limit)."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidDigest": (400, "The Content-MD5 you specified was invalid."),
    "InvalidPart": (
        400,
        "One or more of the specified parts could not be found.  The part may not have been uploaded, or the "
        "specified entity tag may not match the part's entity tag.",
    ),
    "InvalidPartOrder": (
        400,
        "The list of parts was not in ascending order. Parts must be ordered by part number.",
    ),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "Invalid Request"),
    "InvalidStorageClass": (400, "The storage class you specified is not valid"),
    "InvalidToken": (400, "The provided token is malformed or otherwise invalid."),
    "InvalidURI": (400, "Couldn't parse the specified URI."),
    "KeyTooLongError": (400, "Your key is too long"),
    "MalformedXML": (
        400,
        "The XML you provided was not well-formed or did not validate against our published schema",
    ),
    "MetadataTooLarge": (400, "Your metadata headers exceed the maximum allowed metadata size"),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (
        404,
        "The specified upload does not exist. The upload ID may be invalid, or the upload may have been aborted "
        "or completed.",
    ),
    "NotImplemented": (501, "A header you provided implies functionality that is not implemented"),
    "PermanentRedirect": (
        301,
        "The bucket you are attempting to access must be addressed using the specified endpoint. Please send all "
        "future requests to this endpoint.",
    ),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "RequestHeaderSectionTooLarge": (400, "Your request header section exceeds the maximum allowed size."),
    "RequestTimeTooSkewed": (
        403,
        "The difference between the request time and the current time is too large.",
    ),
    "RequestTimeout": (400, "Your socket connection to the server was not read from or written to in time."),
    "ServiceUnavailable": (503, "Service is unable to handle request."),
    "SignatureDoesNotMatch": (
        403,
        "The request signature we calculated does not match the signature you provided. Check your key and "
        "signing method.",
    ),
    "SlowDown": (503, "Please reduce your request rate."),
    "TemporaryRedirect": (307, "Please re-send this request to the specified temporary endpoint."),
    "TooManyRequests": (429, "Please reduce your request rate."),
    "XAmzContentSHA256Mismatch": (
        400,
        "The provided 'x-amz-content-sha256' header does not match what was computed.",
    ),
}


class S3Error(Exception):
    """An error answer. `fields` become elements of its XML, `headers` become headers of it."""

    def __init__(
        self,
        code: str,
        message: str | None = None,
        status: int | None = None,
        headers: dict[str, str] | None = None,
        **fields: object,
    ) -> None:
        known_status, known_message = CODES.get(code, (500, code))
        self.code = code
        self.message = known_message if message is None else message
        self.status = known_status if status is None else status
        self.headers = headers or {}
        self.fields = fields
        super().__init__(f"{code}: {self.message}")

    def body(self, resource: str, request_id: str, host_id: str) -> bytes:
        children = [("Code", self.code), ("Message", self.message)]
        children += [(name.replace("_", "-"), value) for name, value in self.fields.items()]
        children += [("Resource", resource), ("RequestId", request_id), ("HostId", host_id)]
        return xml_document("Error", children, namespace=None)


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff\ud800-\udfff]")


def xml_text(value: object) -> str:
    """Escapes. Control characters become references, as S3 writes them, though XML 1.0 does not allow them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return CONTROL.sub(lambda match: f"&#x{ord(match.group()):x};", escape(str(value), {'"': "&quot;"}))


def xml_element(name: str, value: object) -> str:
    """`value` is text, or a list of (name, value) of children; a child that is None is left out."""
    return f"<{name}>{_inner(value)}</{name}>"


def _inner(value: object) -> str:
    if isinstance(value, list):
        return "".join(xml_element(child, content) for child, content in value if content is not None)
    return xml_text(value)


def xml_document(name: str, value: object, namespace: str | None = NAMESPACE) -> bytes:
    attribute = f' xmlns="{namespace}"' if namespace else ""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{attribute}>{_inner(value)}</{name}>'
    return text.encode("utf-8", "replace")
