"""The same security as a `Server`'s for one of our own: TLS with an ALPN protocol, and its tokens."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from springtide.errors import InvalidArgument, SpringtideError
from springtide.rpc.certificates import stamps
from springtide.rpc.interceptors import accepts_token, no_token
from springtide.rpc.server import Security, read_tokens

log = logging.getLogger(__name__)

Authorize = Callable[[bytes | None], SpringtideError | None]
"""Takes the value of `authorization`; gives the error that the call ends with, or None where it may go on."""


def tls_context(security: Security, protocol: str = "h2") -> ssl.SSLContext | None:
    """For a listener, with `protocol` as its ALPN name; None without TLS. A renewed certificate is used from the next
    handshake on. Raises InvalidArgument."""
    if not security.has_tls:
        return None
    files = [Path(path) for path in (security.tls_cert, security.tls_key, security.tls_client_ca) if path]
    try:
        context, stamp = _context(security, protocol), stamps(files)
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            field="tls_cert",
            value=security.tls_cert,
            problem=f"cannot be used with tls_key and tls_client_ca: {error}",
            remedy="Set them to PEM files that belong together.",
        ) from None
    in_force, seen = context, stamp

    def renew(connection: ssl.SSLObject, _name: str | None, _of: ssl.SSLContext) -> None:
        """Called in each handshake. A pair that cannot be used is logged, and the last good one stays."""
        nonlocal in_force, seen
        try:
            found = stamps(files)
            if found != seen:
                seen = found
                in_force = _context(security, protocol)
                log.info("the certificate %s has been read again", security.tls_cert)
        except (ssl.SSLError, OSError) as error:
            log.error("the new certificate cannot be used, the old one stays: %s", error)
        if in_force is not context:
            connection.context = in_force

    context.sni_callback = renew
    return context


def _context(security: Security, protocol: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols([protocol])
    made.load_cert_chain(security.tls_cert, security.tls_key)
    if security.tls_client_ca:
        made.load_verify_locations(security.tls_client_ca)
        made.verify_mode = ssl.CERT_REQUIRED
    return made


def authorizer(security: Security) -> Authorize:
    """Asks for a token where the security has a token_file. Raises InvalidArgument."""
    if not security.token_file:
        return lambda value: None
    tokens = tuple(token.encode() for token in read_tokens(security.token_file))

    def authorize(value: bytes | None) -> SpringtideError | None:
        return None if accepts_token(tokens, (value or b"").decode("latin-1")) else no_token()

    return authorize
