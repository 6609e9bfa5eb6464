"""KV caches that go from one simulated engine to another: vLLM's disaggregated prefill, with a real transfer over TCP.

A request with `do_remote_decode` leaves its prompt's KV here, under its id, and its answer says where to fetch it. A
request with `do_remote_prefill` fetches it there, once. What is fetched is a chain of digests over the prompt's blocks:
KV of another prompt is recognised, as wrong numbers would be by nobody.

The side channel is one JSON line each way, then the bytes.
"""

import asyncio
import contextlib
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

LEASE_S = 30.0
"""How long KV is held for somebody to fetch it; vLLM's kv_lease_duration."""
MAX_HELD = 1024
_MAX_LINE_BYTES = 64 * 1024
_MAX_KV_BYTES = 64 * 1024 * 1024
_DIGEST_BYTES = 32


class KvLost(Exception):
    """The KV of a prompt cannot be had."""


@dataclass(frozen=True, slots=True)
class KvConfig:
    """Of --kv-transfer-config. `recompute`: what cannot be loaded is computed; else the request fails."""

    recompute: bool = False
    lease_s: float = LEASE_S
    host: str = field(default_factory=lambda: os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or "127.0.0.1")
    port: int = field(default_factory=lambda: int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT") or 0))


def parse_config(text: str) -> KvConfig:
    """vLLM's JSON. Raises ValueError that names the field."""
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"--kv-transfer-config is no JSON: {error}") from None
    if not isinstance(fields, dict) or not fields.get("kv_connector"):
        raise ValueError("--kv-transfer-config must be an object with kv_connector")
    policy = fields.get("kv_load_failure_policy", "fail")
    if policy not in ("fail", "recompute"):
        raise ValueError(f"kv_load_failure_policy must be fail or recompute, got {policy!r}")
    extra = fields.get("kv_connector_extra_config") or {}
    lease = extra.get("kv_lease_duration", LEASE_S) if isinstance(extra, dict) else None
    if isinstance(lease, bool) or not isinstance(lease, int | float) or lease <= 0:
        raise ValueError(f"kv_lease_duration must be above 0, got {lease!r}")
    return KvConfig(policy == "recompute", float(lease))


def kv_of(ids: Sequence[int], block_size: int) -> bytes:
    """What stands for the KV of a prompt: one digest for each block, each over all that is before it too."""
    digest, parts = b"", []
    for at in range(0, len(ids), block_size):
        block = b",".join(b"%d" % token_id for token_id in ids[at : at + block_size])
        digest = hashlib.blake2b(digest + block, digest_size=_DIGEST_BYTES).digest()
        parts.append(digest)
    return b"".join(parts)


@dataclass(slots=True)
class KvCounts:
    """What /metrics shows."""

    held: int = 0
    pulling: int = 0
    sent: int = 0
    received: int = 0
    failed: int = 0
    recomputed: int = 0
    expired: int = 0


class KvTransfer:
    """One engine's. `dropped` is asked once for each transfer: true where the KV is gone."""

    def __init__(self, config: KvConfig, engine_id: str, dropped: Callable[[], bool]) -> None:
        self.config = config
        self.counts = KvCounts()
        self._engine_id = engine_id
        self._dropped = dropped
        self._held: OrderedDict[str, tuple[bytes, asyncio.TimerHandle]] = OrderedDict()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._talks: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listens for those that fetch. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, self.config.host, self.config.port)
        self._port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """No more transfers."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._talks):
            writer.close()

    # ------------------------------------------------------------ the prefill side

    def hold(self, request_id: str, ids: Sequence[int], block_size: int) -> dict[str, object]:
        """Keeps the KV of a prompt; gives the answer's `kv_transfer_params`, worded as by vLLM's NIXL connector."""
        while len(self._held) >= MAX_HELD:
            self._expire(next(iter(self._held)))
        kv = kv_of(ids, block_size)
        timer = asyncio.get_running_loop().call_later(self.config.lease_s, self._expire, request_id)
        self._held[request_id] = kv, timer
        self.counts.held = len(self._held)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(len(kv) // _DIGEST_BYTES))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": self.config.host,
            "remote_port": self._port,
            "tp_size": 1,
            "remote_num_tokens": len(ids),
            "transfer_mode": "pull",
        }

    def _expire(self, request_id: str) -> None:
        if self._take(request_id) is not None:
            self.counts.expired += 1

    def _take(self, request_id: str) -> bytes | None:
        found = self._held.pop(request_id, None)
        self.counts.held = len(self._held)
        if found is None:
            return None
        found[1].cancel()
        return found[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._talks.add(writer)
        try:
            async with asyncio.timeout(10):
                asked = orjson.loads(await reader.readline())
            kv = self._take(str(asked.get("request_id"))) if asked.get("engine_id") == self._engine_id else None
            if kv is not None and self._dropped():
                kv = None
            writer.write(orjson.dumps({"found": kv is not None, "bytes": len(kv or b"")}) + b"\n" + (kv or b""))
            await writer.drain()
            self.counts.sent += kv is not None
        except (OSError, TimeoutError, ValueError, AttributeError):
            pass  # whoever asked will see that nothing comes
        finally:
            self._talks.discard(writer)
            writer.close()

    # ------------------------------------------------------------ the decode side

    async def fetch(self, params: Mapping[str, Any], ids: Sequence[int], block_size: int) -> None:
        """Returns once the KV of this prompt is here. Waits for ever for a partner that is silent, as RDMA would.

        Raises KvLost.
        """
        host, port = params.get("remote_host"), params.get("remote_port")
        if not isinstance(host, str) or type(port) is not int:
            raise KvLost("kv_transfer_params names no remote_host and remote_port")
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
        except OSError as error:
            raise KvLost(f"cannot connect to {host}:{port}: {error}") from None
        try:
            asked = {"engine_id": params.get("remote_engine_id"), "request_id": params.get("remote_request_id")}
            writer.write(orjson.dumps(asked) + b"\n")
            told = orjson.loads(await reader.readline())
            size = told.get("bytes") if told.get("found") else None
            if type(size) is not int or not 0 < size <= _MAX_KV_BYTES:
                raise KvLost(f"{host}:{port} does not hold it")
            kv = await reader.readexactly(size)
        except (OSError, ValueError, AttributeError, asyncio.IncompleteReadError) as error:
            raise KvLost(f"{host}:{port} closed the transfer: {error}") from None
        finally:
            with contextlib.suppress(OSError):
                writer.close()
        if kv != kv_of(ids, block_size):
            raise KvLost(f"{host}:{port} sent the KV of another prompt")
        self.counts.received += 1
