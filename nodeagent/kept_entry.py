"""The ledger's entry of one worker while its engine is there: kept current on the disk, and what is told by it."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodeagent.ledger import LedgerEntry
from nodeagent.setup import NodeSetup
from springtide.telemetry import emit_span
from springtide.telemetry.spans import AttributeValue

log = logging.getLogger("nodeagent.incarnation")  # one name for all that is told of a worker's life


class KeptEntry:
    """`entry` is the present one."""

    def __init__(self, setup: NodeSetup, entry: LedgerEntry) -> None:
        self._setup = setup
        self.entry = entry

    def remember(self, **fields: Any) -> None:
        """Changes the entry, on the disk."""
        self.entry = dataclasses.replace(self.entry, **fields)
        self.save()

    def save(self) -> None:
        """The ledger again, where losing the newest lines costs little: adoption finds the rest at the shim."""
        try:
            self._setup.ledger.write(self.entry)
        except OSError as error:
            log.error("the ledger of worker %s is behind: %s", self.entry.worker_id, error, extra=self.fields())

    @property
    def log_path(self) -> Path:
        """The engine's log."""
        return self._setup.ledger.folder(self.entry.worker_id) / "engine.log"

    @property
    def shim_log_path(self) -> Path:
        """Its shim's."""
        return self.log_path.with_name("shim.log")

    def span(self, name: str, start_s: float, phases: Mapping[str, float] | None = None) -> None:
        """A part of the worker's trace that ends now."""
        attributes: dict[str, AttributeValue] = {
            "springtide.pool": self.entry.pool,
            "springtide.worker": self.entry.worker_id,
            "springtide.node": self._setup.node_id,
            "springtide.incarnation": self.entry.incarnation,
            **{f"springtide.start.{phase}_s": seconds for phase, seconds in (phases or {}).items()},
        }
        now = self._setup.clock.now()
        emit_span(name, traceparent=self.entry.traceparent, start_s=start_s, end_s=now, attributes=attributes)

    def fields(self) -> dict[str, object]:
        """Of log lines."""
        return {
            "worker": self.entry.worker_id,
            "pool": self.entry.pool,
            "incarnation": self.entry.incarnation,
            "traceparent": self.entry.traceparent,
        }
