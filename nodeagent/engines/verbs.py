"""Verbs by name, for orders that come from afar: what each takes, and what it answers."""

import dataclasses
from collections.abc import Mapping

from nodeagent.engines.adapter import EngineAdapter
from nodeagent.engines.http import EngineHttp
from springtide.errors import InvalidArgument

VERBS: Mapping[str, tuple[str, ...]] = {
    "ready": (),
    "warm_up": ("model",),
    "load": (),
    "capabilities": (),
    "wait_idle": (),
    "abort": ("id",),
    "abort_all": (),
    "pause": ("mode",),
    "resume": (),
    "flush_cache": (),
    "weight_version": (),
    "profile": ("action",),
}
"""Verb to the names of its arguments. Releasing, restoring and weights are wishes with a record, not orders."""

GENERATING = frozenset({"warm_up"})
"""Never sent to an engine that sleeps."""


async def perform(
    adapter: EngineAdapter, http: EngineHttp, verb: str, args: Mapping[str, str], timeout_s: float
) -> dict[str, object]:
    """Does one verb and answers plain values. Raises InvalidArgument, Unimplemented and what the verb raises."""
    check(verb, args)
    http = EngineHttp(http.endpoint, timeout_s)
    match verb:
        case "ready":
            found = await adapter.ready(http)
            return {"ready": found.ready, "reason": found.reason.value, "detail": found.detail}
        case "warm_up":
            await adapter.warm_up(http, args.get("model", ""), timeout_s)
        case "load":
            load = await adapter.load(http)
            return {**dataclasses.asdict(load), "idle": load.idle}
        case "capabilities":
            capabilities = await adapter.capabilities(http)
            return {"missing": dict(capabilities.missing), "asked": capabilities.asked}
        case "wait_idle":
            await adapter.wait_idle(http, timeout_s * 0.9)
        case "abort":
            await adapter.abort(http, args.get("id", ""))
        case "abort_all":
            await adapter.abort_all(http)
        case "pause":
            await adapter.pause(http, args.get("mode") or "keep")
        case "resume":
            await adapter.resume(http)
        case "flush_cache":
            await adapter.flush_cache(http)
        case "weight_version":
            return {"weight_version": await adapter.weight_version(http)}
        case "profile":
            await adapter.profile(http, args["action"] == "start")
    return {}


def check(verb: str, args: Mapping[str, str]) -> None:
    """Raises InvalidArgument for an unknown verb, an argument that it does not take, or a bad one."""
    if verb not in VERBS:
        raise InvalidArgument(
            field="verb", value=verb, problem="is no verb of an engine", remedy=f"Use one of {', '.join(VERBS)}."
        )
    unknown = sorted(set(args) - set(VERBS[verb]))
    if unknown:
        takes = ", ".join(VERBS[verb]) or "nothing"
        raise InvalidArgument(
            field=f"args.{unknown[0]}", value=args[unknown[0]], problem=f"is nothing that {verb} takes",
            remedy=f"It takes {takes}.",
        )  # fmt: skip
    if verb == "profile" and args.get("action") not in ("start", "stop"):
        raise InvalidArgument(
            field="args.action", value=args.get("action"), problem="is no action", remedy="Use start or stop."
        )
