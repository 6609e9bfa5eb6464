"""Steps of one engine run in the order of the file; each one's facts and outcome go into a JSON report at once."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.engines import Kit, kits
from tests.gpu.rig import Rig, host_facts

REPORT = Path(os.environ.get("SPRINGTIDE_GPU_REPORT", "build/gpu-report.json"))
collect_ignore_glob = [] if os.environ.get("SPRINGTIDE_GPU_TESTS") else ["test_*.py"]
_document: dict[str, Any] = {"schema": 1, "host": host_facts(), "engines": {}}


def _save() -> None:
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    partial = REPORT.with_suffix(".tmp")
    partial.write_text(json.dumps(_document, indent=1, default=str))
    partial.replace(REPORT)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" in metafunc.fixturenames:
        found = kits()
        names = [f"{kit.engine}-cpu" if kit.simulated and kit.engine != "sim" else kit.engine for kit in found]
        metafunc.parametrize("rig", found, ids=names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One stack for all steps of an engine."""
    kit: Kit = request.param
    rig = Rig(kit, tmp_path_factory.mktemp(kit.engine))
    _document["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    _document["host"] |= rig.devices.facts()
    _document["engines"][kit.engine] = {
        "version": kit.version,
        "args": kit.args,
        "steps": {},
        "simulated": kit.simulated,
    }
    _save()
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    rig = getattr(item, "funcargs", {}).get("rig")
    if not isinstance(rig, Rig) or (report.when != "call" and report.passed):
        return report
    name = item.function.__name__.removeprefix("test_")  # type: ignore[attr-defined]
    entry: dict[str, Any] = {"outcome": report.outcome, "seconds": round(report.duration, 2), "facts": rig.facts}
    if not report.passed:
        entry["why"] = str(report.longrepr)[-3000:]
        entry["logs"] = rig.log_tails()
    _document["engines"][rig.kit.engine]["steps"][name] = entry
    rig.facts = {}
    _save()
    return report
