"""A listener's certificate, read again when its files have changed: a renewed one needs no restart.

gRPC asks before each handshake. Connections that stand keep the certificate that they began with. A pair that cannot be
read, or whose key does not fit, is logged and the last good one stays.
"""

import logging
import ssl
from collections.abc import Iterable
from pathlib import Path

import grpc

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


def stamps(paths: Iterable[Path]) -> Stamp:
    """What tells that one of the files is another one now. Raises OSError."""
    return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in (path.stat() for path in paths))


class Certificates:
    """`first` for the start, `fetch` for each handshake after it. Raises OSError, ssl.SSLError."""

    def __init__(self, cert: str, key: str, client_ca: str = "") -> None:
        self._paths = tuple(Path(path) for path in (key, cert, client_ca) if path)
        self._stamp = stamps(self._paths)
        self._failed: Stamp | None = None
        self.first = self._load()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: unchanged. Called by gRPC's own thread; never raises."""
        try:
            stamp = stamps(self._paths)
            if stamp in (self._stamp, self._failed):
                return None
            self._failed = stamp  # until it has worked
            loaded = self._load()
        except (OSError, ssl.SSLError) as error:
            log.error("the new certificate cannot be used, the old one stays: %s", error)
            return None
        self._stamp, self._failed = stamp, None
        log.info("the certificate %s has been read again", self._paths[1])
        return loaded

    def _load(self) -> grpc.ServerCertificateConfiguration:
        key, cert, *ca = (path.read_bytes() for path in self._paths)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._paths[1], self._paths[0])
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca[0] if ca else None)
