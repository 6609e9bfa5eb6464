"""Join tokens: secrets that let one provisioner, or the agents of one order, into a control plane over a network.

A token is its claims and their HMAC-SHA256 under a secret that only the control plane has (mode 0600 in its data
folder), so nothing is stored per token. It names what it is for: a provisioner's token opens ProvisionerService to that
id, a node's token opens AgentService to those node ids, and neither opens anything else.

    stj1.BASE64URL(claims as JSON).BASE64URL(hmac)
"""

import base64
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from springtide.clock import Clock
from springtide.errors import FailedPrecondition, Unauthenticated

PREFIX = "stj1."
SECRET_FILE = "join.secret"
_SECRET_BYTES = 32
_MOST_CHARS = 65536

SERVICES: Mapping[str, str] = {
    "provisioner": "/springtide.v1.ProvisionerService/",
    "node": "/springtide.v1.AgentService/",
}


@dataclass(frozen=True, slots=True)
class JoinToken:
    """What a token says. `kind`: provisioner or node; `ids`: who may show it."""

    kind: str
    ids: tuple[str, ...]
    expires_at: float
    expired: bool = False

    def opens(self, method: str) -> bool:
        """Whether it is for the service of `method` (/package.Service/Method)."""
        return method.startswith(SERVICES.get(self.kind, "\0"))


class JoinTokens:
    """Makes and reads tokens under one secret."""

    def __init__(self, secret: bytes, clock: Clock) -> None:
        self._secret = secret
        self._clock = clock

    def for_provisioner(self, provisioner_id: str, valid_for_s: float) -> str:
        return self._make("provisioner", [provisioner_id], valid_for_s)

    def for_nodes(self, node_ids: Iterable[str], valid_for_s: float) -> str:
        return self._make("node", node_ids, valid_for_s)

    def _make(self, kind: str, ids: Iterable[str], valid_for_s: float) -> str:
        claims = {"kind": kind, "ids": list(ids), "exp": round(self._clock.now() + valid_for_s, 3)}
        body = _encode(json.dumps(claims, separators=(",", ":")).encode())
        return f"{PREFIX}{body}.{_encode(self._sign(body))}"

    def _sign(self, body: str) -> bytes:
        return hmac.digest(self._secret, body.encode(), sha256)

    def read(self, token: str) -> JoinToken:
        """Raises Unauthenticated for one that was not made under this secret. An expired one is returned as such."""
        body, _, signature = token.removeprefix(PREFIX).partition(".")
        try:
            if len(token) > _MOST_CHARS or not hmac.compare_digest(_decode(signature), self._sign(body)):
                raise ValueError("the signature does not fit")
            claims = json.loads(_decode(body))
            expires_at = float(claims["exp"])
            ids = tuple(str(found) for found in claims["ids"])
            return JoinToken(str(claims["kind"]), ids, expires_at, self._clock.now() >= expires_at)
        except (ValueError, KeyError, TypeError):
            raise Unauthenticated(
                "The join token was not made by this control plane.",
                reason="BAD_JOIN_TOKEN",
                remedy="Make one with `springtide token create --provisioner ID`, and set it as SPRINGTIDE_TOKEN.",
            ) from None


def bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The token of `authorization: Bearer TOKEN`; empty when there is none."""
    for key, value in metadata:
        if key == "authorization":
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            scheme, _, token = text.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return ""


def expired(token: JoinToken) -> Unauthenticated:
    return Unauthenticated(
        f"The join token of {token.kind} {', '.join(token.ids[:4])} has expired.",
        reason="JOIN_TOKEN_EXPIRED",
        remedy="Make a new one with `springtide token create --provisioner ID`; a node gets its own from its order.",
    )


def not_for(token: JoinToken, kind: str, name: str) -> Unauthenticated:
    """It is somebody else's."""
    return Unauthenticated(
        f"The join token is of {token.kind} {', '.join(token.ids[:4])}, not of {kind} {name!r}.",
        reason="JOIN_TOKEN_OF_ANOTHER",
        field=f"hello.{kind}_id",
        value=name,
        remedy=f"Show the token that was made for this {kind}.",
    )


def load_secret(data_dir: Path) -> bytes:
    """The secret of a data folder, made when there is none. Raises FailedPrecondition for one that others may read,
    OSError."""
    path = data_dir / SECRET_FILE
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        # No pid in the name: in a container it is the same at each start, and what a killed process left would be met.
        partial = data_dir / f".{SECRET_FILE}.{secrets.token_hex(8)}"
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(secrets.token_hex(_SECRET_BYTES).encode())
                file.flush()
                os.fsync(fd)  # an empty secret after a power cut would be refused at each start
            os.link(partial, path)  # the first of two that start at once wins
        except FileExistsError:
            pass
        finally:
            partial.unlink(missing_ok=True)
    mode = path.stat().st_mode & 0o777
    found = path.read_bytes().strip()
    if mode & 0o077 or len(found) < _SECRET_BYTES:
        raise FailedPrecondition(
            f"{path} (mode {mode:03o}) cannot be used: others may read it, or it is too short.",
            reason="JOIN_SECRET_UNSAFE",
            field="data_dir",
            value=str(path),
            remedy="Remove it (all join tokens made with it end), or chmod 600 it if nobody has read it.",
        )
    return found


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
