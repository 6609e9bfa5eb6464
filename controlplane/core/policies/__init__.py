"""Scaling policies by name. Each is one small module with the interface of controlplane.core.policy.

A name is a policy, and with `+` what stands around it: `slo+predictive`, `load_ratio+schedule`. Modifiers have settings
with a prefix of their own (`predictive_`, `schedule_`, `role_ratio_`); settings with the prefix `stage_` put the shared
stages around any policy. The order is: policy, stages, modifiers from left to right, bounds.
"""

from collections.abc import Callable, Mapping

from controlplane.core.policies import predictive, role_ratio, schedule, staged
from controlplane.core.policies.capability import Capability
from controlplane.core.policies.content import normalised, unknown
from controlplane.core.policies.fixed_elastic import FixedElastic
from controlplane.core.policies.greedy import Greedy
from controlplane.core.policies.least import Least
from controlplane.core.policies.load_ratio import LoadRatio
from controlplane.core.policies.plugins import PLUGINS, Factory, guarded, register
from controlplane.core.policies.settings import Reader
from controlplane.core.policies.slo import Slo
from controlplane.core.policies.static import Static
from controlplane.core.policies.thresholds import Thresholds
from controlplane.core.policies.vanilla import Vanilla
from controlplane.core.policies.waterfall import Waterfall
from controlplane.core.policies.wrapping import Modifier, Wrapped
from controlplane.core.policy import Policy
from springtide.errors import InvalidArgument
from springtide.model.pool import PolicySpec, Setting

__all__ = [
    "MODIFIERS",
    "RECOMMENDED",
    "REGISTRY",
    "Factory",
    "known_policies",
    "make_policy",
    "register",
    "tells_needs_apart",
]

REGISTRY: Mapping[str, Factory] = {
    "load_ratio": LoadRatio.read,
    "static": Static.read,
    "no": Static.read,
    "vanilla": Vanilla.read,
    "capability": Capability.read,
    "fixed_elastic": FixedElastic.read,
    "waterfall": Waterfall.read,
    "greedy": Greedy.read,
    "thresholds": Thresholds.read,
    "slo": Slo.read,
}

MODIFIERS: Mapping[
    str, tuple[str, Callable[[Reader], Modifier], Factory]
] = {  # prefix, reader, what it stands on alone
    "predictive": (predictive.PREFIX, predictive.Predictive.read, Least.read),
    "schedule": (schedule.PREFIX, schedule.Schedule.read, Static.read),
    "role_ratio": (role_ratio.PREFIX, role_ratio.RoleRatio.read, Least.read),
}

RECOMMENDED = PolicySpec(
    "slo"
)  # what the comparison with other projects shows; a pool that says nothing has load_ratio

_ALIASES = {"waterfall_v1": "waterfall"}


def known_policies() -> list[str]:
    """Every name that `make_policy` takes by itself."""
    return sorted({*REGISTRY, *MODIFIERS, *PLUGINS})


_MADE_KEPT = 1024
_made: dict[tuple[object, ...], tuple[str, Factory | None, Policy]] = {}


def make_policy(spec: PolicySpec, min_workers: int, max_workers: int) -> Policy:
    """The policy that a pool names, its settings checked. Raises InvalidArgument. Ours do not change, so that one is
    made once: it is asked for in every plan."""
    settings = tuple((key, type(value), value) for key, value in spec.settings.items())
    key = (spec.name, settings, min_workers, max_workers)
    kept = _made.get(key)
    if kept is not None and kept[0] not in PLUGINS and REGISTRY.get(kept[0]) is kept[1]:
        return kept[2]
    base, made = _make(spec, min_workers, max_workers)
    if len(_made) >= _MADE_KEPT:
        _made.clear()
    _made[key] = (base, REGISTRY.get(base), made)
    return made


def _make(spec: PolicySpec, min_workers: int, max_workers: int) -> tuple[str, Policy]:
    """(the name before the first +, the policy)."""
    spec, _ = normalised(spec)
    base, *modifiers = [part.strip() for part in spec.name.split("+")]
    base = _ALIASES.get(base, base)
    if base in MODIFIERS and base not in PLUGINS:
        base, modifiers = "", [base, *modifiers]
    for name in modifiers:
        if name not in MODIFIERS:
            raise unknown(name, MODIFIERS)
    if len(set(modifiers)) < len(modifiers):
        raise InvalidArgument(
            field="policy.name", value=spec.name, problem="it names a part twice", remedy="Name each part once."
        )
    own, around = _split(spec.settings, modifiers)
    policy = _base(base, modifiers, own, min_workers, max_workers)
    if around.get("stages"):
        reader = _reader("stages", staged.PREFIX, around["stages"])
        policy = Wrapped(policy, staged.Staged.read(reader, policy.monitoring_interval_s), policy.name)
    for name in modifiers:
        prefix, read, _ = MODIFIERS[name]
        modifier = read(_reader(name, prefix, around.get(name, {})))
        composed = f"{policy.name}+{name}" if base or name != modifiers[0] else name
        policy = Wrapped(policy, modifier, composed)
    return base, policy


def tells_needs_apart(spec: PolicySpec) -> bool:
    """Whether the policy that is named scales requests of unlike needs by themselves. The spec is one that was made."""
    base = normalised(spec)[0].name.split("+")[0].strip()
    return _ALIASES.get(base, base) in ("capability", "waterfall")


def _base(name: str, modifiers: list[str], raw: Mapping[str, Setting], least: int, most: int) -> Policy:
    if not name:
        return MODIFIERS[modifiers[0]][2](raw, least, most)
    if name in PLUGINS:
        return guarded(name, PLUGINS[name], raw, least, most)
    factory = REGISTRY.get(name)
    if factory is None:
        raise unknown(name, known_policies())
    return factory(raw, least, most)


def _split(
    settings: Mapping[str, Setting], modifiers: list[str]
) -> tuple[dict[str, Setting], dict[str, dict[str, Setting]]]:
    """(the policy's own settings, those of each modifier and of the stages). A prefix of a modifier that is not named
    stays with the policy, which does not know it."""
    prefixes = {MODIFIERS[name][0]: name for name in modifiers} | {staged.PREFIX: "stages"}
    own: dict[str, Setting] = {}
    around: dict[str, dict[str, Setting]] = {}
    for key, value in settings.items():
        name = next((name for prefix, name in prefixes.items() if key.startswith(prefix)), None)
        if name is None:
            own[key] = value
        else:
            around.setdefault(name, {})[key] = value
    return own, around


def _reader(name: str, prefix: str, raw: Mapping[str, Setting]) -> Reader:
    classes: Mapping[str, type] = {
        "predictive": predictive.Predictive,
        "schedule": schedule.Schedule,
        "role_ratio": role_ratio.RoleRatio,
        "stages": staged.Staged,
    }
    reader = Reader(name, raw)
    reader.reject_unknown(f"{prefix}{key}" for key in classes[name].__dataclass_fields__)  # type: ignore[attr-defined]
    return reader
