"""Providers by kind: built-in modules, and plug-ins of the entry point group `springtide.provisioners`."""

import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from provisioner.context import ProviderContext
from provisioner.core.provider import Provider
from springtide.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger(__name__)

GROUP = "springtide.provisioners"
BUILT_IN = ("local", "static", "slurm", "ray", "ecs", "kubernetes")

Create = Callable[[Mapping[str, Any], ProviderContext], Provider]


def load_create(kind: str) -> Create:
    """`create` of the kind's module. A plug-in names the module, or the function itself. Raises InvalidArgument for an
    unknown kind, FailedPrecondition for one whose packages are not installed."""
    if kind in BUILT_IN:
        return _create_of(_imported(kind), kind)
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in plugins:
        raise InvalidArgument(
            field="kind",
            value=kind,
            problem="is no kind of provisioner",
            remedy=f"Known: {', '.join([*BUILT_IN, *sorted(plugins)])}; plug-ins use the entry point group {GROUP}.",
            reason="UNKNOWN_KIND",
        )
    try:
        return _create_of(plugins[kind].load(), kind)
    except ImportError as error:
        raise _not_installed(kind, error) from None


def _imported(kind: str) -> Any:
    try:
        return importlib.import_module(f"provisioner.{kind}")
    except ImportError as error:
        raise _not_installed(kind, error) from None


def _create_of(found: Any, kind: str) -> Create:
    create: Create | None = found if callable(found) else getattr(found, "create", None)
    if create is None:
        raise FailedPrecondition(
            f"the plug-in {kind!r} has no function `create(config, context)`.", reason="BAD_PLUGIN", field="kind"
        )
    return create


def _not_installed(kind: str, error: ImportError) -> FailedPrecondition:
    return FailedPrecondition(
        f"kind = {kind!r}: {error}.",
        reason="NOT_INSTALLED",
        field="kind",
        value=kind,
        remedy=f"Install it: pip install 'springtide[{kind}]'.",
    )
