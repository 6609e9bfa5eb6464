"""The routing table as last heard, kept on disk: a router that starts while the control plane is away routes by it.

It may be old. That is safe: a shim refuses what names another incarnation or comes while it drains, and a worker that
is gone is tried like any other that broke. The control plane's first snapshot replaces it.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

from google.protobuf.message import DecodeError

from springtide.errors import InvalidArgument
from springtide.model.routing import RoutingTable
from springtide.v1 import routing_pb2 as pb
from springtide.wire.routing import snapshot_from_proto, snapshot_to_proto

log = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024 * 1024
"""About a hundred thousand workers. A larger table is not kept."""
_MAGIC = b"springtide routing table 1\n"
_DIGEST_BYTES = 32
_PAUSE_S = 0.25  # between two writes: a pool that scales changes its table often


class LastTable:
    """One file. `run` until cancelled writes what `changed` was told; what is not yet written then, is."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self._path = path
        self._writes = writes
        self._unsaved: RoutingTable | None = None
        self._wake = asyncio.Event()
        self._saving = threading.Lock()

    def load(self) -> RoutingTable | None:
        """None where there is none, or none that can be trusted: that is said, and the file is left for a look."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(len(_MAGIC) + _DIGEST_BYTES + MAX_BYTES + 1)
            return decode(raw)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, InvalidArgument) as error:
            log.warning("%s is not used, this router waits for its control plane: %s", self._path, error)
            return None

    def changed(self, table: RoutingTable) -> None:
        """The table is another one now."""
        if self._writes:
            self._unsaved = table
            self._wake.set()

    async def run(self) -> None:
        """At most four writes a second, beside the event loop."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                table, self._unsaved = self._unsaved, None
                if table is not None:
                    await asyncio.to_thread(self._save, table)
                await asyncio.sleep(_PAUSE_S)
        finally:
            if self._unsaved is not None:
                self._save(self._unsaved)

    def _save(self, table: RoutingTable) -> None:
        """Whole or not at all."""
        with self._saving:
            self._replace(table)

    def _replace(self, table: RoutingTable) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            content = encode(table)
            if len(content) > MAX_BYTES:
                log.warning("the routing table has %d bytes: too many to keep it on disk", len(content))
                self._path.unlink(missing_ok=True)
                return
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            partial.replace(self._path)
        except OSError as error:
            log.error("%s cannot be written, the one before stays: %s", self._path, error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def encode(table: RoutingTable) -> bytes:
    """A mark, a digest, and the table as the control plane sends it."""
    content = snapshot_to_proto(table).SerializeToString(deterministic=True)
    return _MAGIC + hashlib.sha256(content).digest() + content


def decode(raw: bytes) -> RoutingTable:
    """Raises ValueError or InvalidArgument for anything that `encode` has not made."""
    if not raw.startswith(_MAGIC):
        raise ValueError("it is no routing table of this version")
    digest, content = raw[len(_MAGIC) :][:_DIGEST_BYTES], raw[len(_MAGIC) + _DIGEST_BYTES :]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("its digest does not fit its content: it was cut or changed")
    message = pb.RoutingSnapshot()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    table = snapshot_from_proto(message)
    # The trace of a start ends with its first routed token, which was in another life.
    return replace(table, workers={name: replace(w, traceparent="") for name, w in table.workers.items()})
