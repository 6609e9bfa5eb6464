"""Fixtures: short folders for sockets, and engines that are always stopped."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.adapter import EngineLaunch
from nodeagent.engines.registry import engine_adapter
from tests import ports
from tests.engines.running import Engine, short_folder, start

StartSim = Callable[..., Coroutine[Any, Any, Engine]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder with a short path."""
    path = short_folder()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def free_port() -> int:
    """A loopback port that was free a moment ago."""
    return ports.free_port()


@pytest.fixture
def launch_sim(folder: Path) -> Iterator[Callable[..., Engine]]:
    """Starts simulated engines with the given flags on unix sockets, ten times as fast as by default."""
    started: list[Engine] = []

    def launch(*flags: str, scale: str = "0.1", **fields: Any) -> Engine:
        place: dict[str, Any] = {"uds_path": str(folder / f"e{len(started)}")} if "port" not in fields else {}
        args = ("--startup-s", "0", "--timing-scale", scale, *flags)
        wanted = EngineLaunch("sim", "sim", "demo", engine_args=args, simulated_gpus=True, **place, **fields)
        started.append(start(engine_adapter("sim"), wanted, folder))
        return started[-1]

    yield launch
    for engine in started:
        engine.stop()


@pytest.fixture
def sim(launch_sim: Callable[..., Engine]) -> StartSim:
    """The same, and ready."""

    async def ready(*flags: str, **fields: Any) -> Engine:
        engine = launch_sim(*flags, **fields)
        await asyncio.wait_for(engine.until_ready(), 30)
        return engine

    return ready
