"""Engines by name: the four that come with Springtide, and those that installed packages add.

A package adds one with an entry point of the group `springtide.engines`, whose name is the engine's and whose object is
a class that satisfies `EngineAdapter` and takes no arguments.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from nodeagent.engines.adapter import EngineAdapter
from nodeagent.engines.llamacpp import LlamaCppAdapter
from nodeagent.engines.sglang import SglangAdapter
from nodeagent.engines.simulated import SimAdapter
from nodeagent.engines.vllm import VllmAdapter
from springtide.errors import InvalidArgument

ENTRY_POINT_GROUP = "springtide.engines"
_BUILT_IN: Mapping[str, EngineAdapter] = {
    adapter.name: adapter for adapter in (VllmAdapter(), SglangAdapter(), LlamaCppAdapter(), SimAdapter())
}


def engine_names() -> list[str]:
    """All names that `engine_adapter` knows."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def engine_adapter(name: str) -> EngineAdapter:
    """The adapter of an engine. Raises InvalidArgument for an unknown one. Built-in names cannot be replaced."""
    built_in = _BUILT_IN.get(name)
    return built_in if built_in is not None else _installed(name)


@cache
def _installed(name: str) -> EngineAdapter:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        adapter: EngineAdapter = point.load()()
        return adapter
    raise InvalidArgument(
        field="engine",
        value=name,
        problem="is no engine of this node",
        remedy=f"Use one of {', '.join(engine_names())}, or install the package that adds it.",
    )
