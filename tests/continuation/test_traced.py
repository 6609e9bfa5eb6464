"""A continuation is visible: a span in the client's trace that says from where to where, and a count (CM7)."""

from typing import Any

import pytest

from springtide import telemetry
from tests.continuation.test_exact import CHAT, Script, request
from tests.continuation.world import Cut, ask, world


async def test_a_continuation_is_a_span_of_the_clients_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[dict[str, Any]] = []
    monkeypatch.setattr(telemetry, "emit_span", lambda name, **fields: spans.append({"name": name, **fields}))
    parent = telemetry.new_traceparent()
    script = Script(Cut(4), Cut(2, "drained"))
    async with world(script) as w:
        told = await ask(w.http_port, CHAT, request(CHAT), b"traceparent: %b\r\n" % parent.encode())
        assert told.done
        continued = [span for span in spans if span["name"] == "springtide.route.continue"]
        assert [span["traceparent"] for span in continued] == [parent, parent]
        assert [span["attributes"]["springtide.reason"] for span in continued] == ["upstream_eof", "drained"]
        for span in continued:
            assert span["end_s"] >= span["start_s"]
            said = span["attributes"]
            assert said["springtide.result"] == "exact"
            assert said["springtide.worker"] != said["springtide.worker_from"]
            assert said["springtide.tokens_kept"] > 0
        assert continued[1]["attributes"]["springtide.worker_from"] == continued[0]["attributes"]["springtide.worker"]
        assert w.count("exact") == 2
