# SPDX-License-Identifier: Apache-2.0
"""The keys that the server accepts, and where temporary ones come from: IMDS, a container's agent, STS."""

from __future__ import annotations

import hmac
import json
import secrets
import time
from dataclasses import dataclass
from urllib.parse import parse_qs

from errors import S3Error, xml_document
from http1 import Request, Response

IMDS_TTL_S_MAX = 21600  # EC2's
STS_SECONDS = range(900, 43201)  # AWS's limits of DurationSeconds
BODY_BYTES_MAX = 64 << 10  # of a form
ROLE = "ropeteam-test-role"


@dataclass
class Credential:
    access_key: str
    secret: str
    token: str | None = None
    expires: float | None = None  # on the server's clock


class Credentials:
    """All keys. The endpoints serve the one that was added or minted last."""

    def __init__(self, container_token: str, web_identity_token: str) -> None:
        self._known: dict[str, Credential] = {}
        self._served: Credential | None = None
        self._imds_tokens: dict[str, float] = {}
        self._container_token = container_token
        self._web_identity_token = web_identity_token
        self.lifetime_s = 3600.0  # of minted ones
        self.renew = True  # the endpoints mint a key when the one they serve has expired

    def add(self, credential: Credential, serve: bool = False) -> None:
        self._known[credential.access_key] = credential
        if serve:
            self._served = credential

    def find(self, access_key: str) -> Credential | None:
        return self._known.get(access_key)

    def expire(self, access_key: str | None, now: float) -> None:
        """Expires one key, or with None all that exist. Keys that are added later are valid."""
        for credential in self._known.values():
            if access_key in (None, credential.access_key):
                credential.expires = now

    def mint(self, now: float, lifetime_s: float | None = None) -> Credential:
        made = Credential(
            "ASIA" + secrets.token_hex(8).upper(),
            secrets.token_urlsafe(30),
            secrets.token_urlsafe(48),
            now + (self.lifetime_s if lifetime_s is None else lifetime_s),
        )
        self.add(made, serve=True)
        return made

    def _serve(self, now: float) -> Credential:
        served = self._served
        if served is None or (self.renew and served.expires is not None and served.expires <= now):
            served = self.mint(now)
        return served

    def _document(self, now: float, **more: str) -> Response:
        served = self._serve(now)
        document = {
            "AccessKeyId": served.access_key,
            "SecretAccessKey": served.secret,
            "Token": served.token or "",
            "Expiration": _seconds(served.expires if served.expires is not None else now + self.lifetime_s),
            **more,
        }
        return Response(headers={"Content-Type": "application/json"}, body=json.dumps(document).encode())

    def imds(self, request: Request, path: str, region: str, now: float) -> Response:
        """EC2's instance metadata, version 2 only. `path` is what follows the endpoint."""
        headers = request.headers
        if path == "/latest/api/token":
            if request.method != "PUT":
                return Response(405)
            ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if "x-forwarded-for" in headers:
                return Response(403)
            if not ttl.isdigit() or not 1 <= int(ttl) <= IMDS_TTL_S_MAX:
                return Response(400)
            token = secrets.token_urlsafe(40)
            self._imds_tokens[token] = now + int(ttl)
            answer = {"Content-Type": "text/plain", "x-aws-ec2-metadata-token-ttl-seconds": ttl}
            return Response(headers=answer, body=token.encode())
        if self._imds_tokens.get(headers.get("x-aws-ec2-metadata-token", ""), 0) <= now:
            return Response(401)
        if request.method != "GET":
            return Response(405)
        folder = "/latest/meta-data/iam/security-credentials/"
        if path in (folder, folder[:-1]):
            return Response(headers={"Content-Type": "text/plain"}, body=ROLE.encode())
        if path == folder + ROLE:
            return self._document(now, Code="Success", LastUpdated=_seconds(now), Type="AWS-HMAC")
        if path == "/latest/meta-data/placement/region":
            return Response(headers={"Content-Type": "text/plain"}, body=region.encode())
        return Response(404)

    def container(self, request: Request, now: float) -> Response:
        """An ECS or EKS agent: its token comes in Authorization, as it stands."""
        if not hmac.compare_digest(
            request.headers.get("authorization", "").encode(), self._container_token.encode()
        ):
            return Response(401, body=b'{"code":"Unauthorized","message":"wrong Authorization"}')
        if request.method != "GET":
            return Response(405)
        return self._document(now, RoleArn=f"arn:aws:iam::000000000000:role/{ROLE}")

    async def sts(self, request: Request, now: float) -> Response:
        """AssumeRoleWithWebIdentity, of a form or a query."""
        text = request.raw_query
        if request.method == "POST":
            text = (await request.receive_bytes(BODY_BYTES_MAX)).decode("utf-8", "replace")
        form = {name: values[-1] for name, values in parse_qs(text).items()}
        if form.get("Action") != "AssumeRoleWithWebIdentity" or form.get("Version") != "2011-06-15":
            return _sts_error(
                400, "InvalidAction", "only AssumeRoleWithWebIdentity of version 2011-06-15 is here"
            )
        for name in ("RoleArn", "RoleSessionName", "WebIdentityToken"):
            if not form.get(name):
                return _sts_error(400, "MissingParameter", f"The request must contain the parameter {name}.")
        if len(form["RoleArn"]) < 20 or not 2 <= len(form["RoleSessionName"]) <= 64:  # AWS's limits
            return _sts_error(400, "ValidationError", "RoleArn or RoleSessionName is too short or too long")
        duration = form.get("DurationSeconds")
        if duration is not None and (not duration.isdigit() or int(duration) not in STS_SECONDS):
            return _sts_error(400, "ValidationError", f"DurationSeconds {duration} is not in 900..43200")
        if not hmac.compare_digest(form["WebIdentityToken"].encode(), self._web_identity_token.encode()):
            return _sts_error(
                400, "InvalidIdentityToken", "The web identity token that was passed is not valid."
            )
        made = self.mint(now, float(duration) if duration else None)
        arn = form["RoleArn"].replace(":role/", ":assumed-role/") + "/" + form["RoleSessionName"]
        result = [
            ("AssumedRoleUser", [("AssumedRoleId", f"AROA:{form['RoleSessionName']}"), ("Arn", arn)]),
            (
                "Credentials",
                [
                    ("AccessKeyId", made.access_key),
                    ("SecretAccessKey", made.secret),
                    ("SessionToken", made.token),
                    ("Expiration", _seconds(made.expires or now)),
                ],
            ),
        ]
        body = [
            ("AssumeRoleWithWebIdentityResult", result),
            ("ResponseMetadata", [("RequestId", secrets.token_hex(8))]),
        ]
        return Response(
            headers={"Content-Type": "text/xml"},
            body=xml_document(
                "AssumeRoleWithWebIdentityResponse", body, "https://sts.amazonaws.com/doc/2011-06-15/"
            ),
        )

    def configure(self, document: dict, now: float) -> dict:
        """POST /_control/credentials: sets, mints or expires; control.py lists the members."""
        self.lifetime_s = float(document.get("lifetime_s", self.lifetime_s))
        self.renew = bool(document.get("renew", self.renew))
        if document.get("expire"):
            self.expire(document.get("access_key"), now)
            return {}
        if "access_key" in document and "secret_key" in document:
            expires = document.get("expires_in_s")
            credential = Credential(
                document["access_key"],
                document["secret_key"],
                document.get("session_token"),
                None if expires is None else now + float(expires),
            )
            self.add(credential, serve=bool(document.get("serve", True)))
        elif document.get("mint"):
            credential = self.mint(now)
        elif set(document) <= {"lifetime_s", "renew"}:
            return {}
        else:
            raise S3Error("BadRequest", "credentials: access_key and secret_key, or mint, or expire")
        return {
            "access_key": credential.access_key,
            "secret_key": credential.secret,
            "session_token": credential.token,
            "expires": credential.expires,
        }


def _seconds(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _sts_error(status: int, code: str, message: str) -> Response:
    error = [("Type", "Sender"), ("Code", code), ("Message", message)]
    body = xml_document("ErrorResponse", [("Error", error), ("RequestId", secrets.token_hex(8))], None)
    return Response(status, {"Content-Type": "text/xml"}, body)
