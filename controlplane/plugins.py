"""Policies that other packages bring, by the entry-point group `springtide.policies`. Loaded once, at start-up.

    [project.entry-points."springtide.policies"]
    mine = "my_package:make"        # make(settings, min_workers, max_workers) -> controlplane.core.policy.Policy

One that cannot be loaded is known by its name all the same: pools that name it hold and say why, others go on. A name
of ours cannot be taken.
"""

import logging
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from controlplane.core.policies import MODIFIERS, REGISTRY, register
from controlplane.core.policies.plugins import broken

GROUP = "springtide.policies"

log = logging.getLogger(__name__)


def load_policies(found: Iterable[EntryPoint] | None = None) -> list[str]:
    """Names that were registered. Never raises: a broken plug-in is nobody else's trouble."""
    names: list[str] = []
    for entry in entry_points(group=GROUP) if found is None else found:
        if entry.name in REGISTRY or entry.name in MODIFIERS:
            log.error("the policy plug-in %s (%s) has the name of one of ours: left out", entry.name, entry.value)
            continue
        try:
            factory = entry.load()
            if not callable(factory):
                raise TypeError(f"{entry.value} cannot be called")
        except Exception as error:
            log.exception("the policy plug-in %s (%s) cannot be loaded", entry.name, entry.value)
            factory = broken(entry.name, f"{type(error).__name__}: {error}")
        register(entry.name, factory)
        names.append(entry.name)
    if names:
        log.info("policy plug-ins: %s", ", ".join(names))
    return names
