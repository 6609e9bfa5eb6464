"""The same security as a `Server`'s for one of our own: TLS with an ALPN protocol, and its tokens."""

import ssl
from collections.abc import Callable

from springtide.errors import InvalidArgument, SpringtideError
from springtide.rpc.interceptors import accepts_token, no_token
from springtide.rpc.server import Security, read_tokens

Authorize = Callable[[bytes | None], SpringtideError | None]
"""Takes the value of `authorization`; gives the error that the call ends with, or None where it may go on."""


def tls_context(security: Security, protocol: str = "h2") -> ssl.SSLContext | None:
    """For a listener, with `protocol` as its ALPN name; None without TLS. Raises InvalidArgument."""
    if not security.has_tls:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    try:
        context.load_cert_chain(security.tls_cert, security.tls_key)
        if security.tls_client_ca:
            context.load_verify_locations(security.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            field="tls_cert",
            value=security.tls_cert,
            problem=f"cannot be used with tls_key and tls_client_ca: {error}",
            remedy="Set them to PEM files that belong together.",
        ) from None
    return context


def authorizer(security: Security) -> Authorize:
    """Asks for a token where the security has a token_file. Raises InvalidArgument."""
    if not security.token_file:
        return lambda value: None
    tokens = tuple(token.encode() for token in read_tokens(security.token_file))

    def authorize(value: bytes | None) -> SpringtideError | None:
        return None if accepts_token(tokens, (value or b"").decode("latin-1")) else no_token()

    return authorize
