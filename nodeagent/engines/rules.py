"""What a node lets pools ask of it: interpreters, engine flags and environment. A pool cannot widen these rules."""

import fnmatch
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from springtide.errors import InvalidArgument
from springtide.telemetry.redaction import redact

# Who sets these can run code of their own in the engine, or see another worker's GPUs.
DENIED_ENV = (
    "LD_*",
    "PYTHON*",
    "PATH",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "BASH_ENV",
    "SPRINGTIDE_*",
    "NOTIFY_SOCKET",
)
_SET_ENV_REMEDY = "Remove it, or let this node allow it (allowed_env)."


@dataclass(frozen=True, slots=True)
class LaunchRules:
    """Set in the agent's own configuration.

    allowed_interpreters: absolute paths or shell patterns; the agent's own interpreter is always allowed.
    allowed_flags, allowed_env: lift single denials (a flag that Springtide itself sets cannot be lifted).
    denied_flags: further ones.
    """

    allowed_interpreters: tuple[str, ...] = ()
    allowed_flags: tuple[str, ...] = ()
    denied_flags: tuple[str, ...] = ()
    allowed_env: tuple[str, ...] = ()


def interpreter_problems(interpreter: str | None, rules: LaunchRules) -> list[InvalidArgument]:
    """Nothing when the interpreter is the agent's own, or allowed here and there."""
    if not interpreter or interpreter == sys.executable:
        return []
    if not os.path.isabs(interpreter):  # noqa: PTH117
        return [
            _interpreter_problem(interpreter, "is no absolute path", "Give the path of the environment's bin/python.")
        ]
    plain = os.path.normpath(interpreter)
    if not any(fnmatch.fnmatchcase(plain, pattern) for pattern in rules.allowed_interpreters):
        allowed = ", ".join(rules.allowed_interpreters) or "none but the agent's own"
        remedy = f"Add it to allowed_interpreters in the agent's configuration (now: {allowed})."
        return [_interpreter_problem(interpreter, "is not allowed on this node", remedy)]
    if not os.access(plain, os.X_OK):
        return [_interpreter_problem(interpreter, "does not exist or is not executable", "Install it on this node.")]
    return []


def flag_problems(
    args: Iterable[str], rules: LaunchRules, *, owned: Mapping[str, str], denied: Mapping[str, str]
) -> list[InvalidArgument]:
    """Flags that pools may not pass. `owned` and `denied` map a flag to its remedy; owned ones cannot be allowed.

    Parsers take `--host=x`, `--served_model_name` and prefixes like `--hos` too, so these are found as well.
    """
    refused = {flag: remedy for flag, remedy in denied.items() if flag not in rules.allowed_flags}
    refused |= dict.fromkeys(rules.denied_flags, "This node denies it (denied_flags).")
    refused |= owned
    problems: list[InvalidArgument] = []
    for arg in args:
        flag = flag_name(arg)
        hit = next((name for name in refused if _means(flag, name)), None) if flag else None
        if hit is not None:
            text = "is set by Springtide" if hit in owned else "is not allowed in engine_args"
            # It ends up in records and logs, and the flag may have been an API key's.
            shown = redact(arg)
            problems.append(InvalidArgument(field="engine_args", value=shown, problem=text, remedy=refused[hit]))
    return problems


def env_problems(env: Iterable[str], rules: LaunchRules) -> list[InvalidArgument]:
    """Variables that pools may not set."""
    return [
        InvalidArgument(field="engine_env", value=name, problem="is not allowed", remedy=_SET_ENV_REMEDY)
        for name in env
        if name not in rules.allowed_env and any(fnmatch.fnmatchcase(name, pattern) for pattern in DENIED_ENV)
    ]


def flag_name(arg: str) -> str:
    """`--served_model_name=x` as `--served-model-name`; "" for what is no flag."""
    if not arg.startswith("-") or arg in ("-", "--") or arg[1:2].isdigit():
        return ""
    return arg.partition("=")[0].replace("_", "-")


def flag_value(args: Collection[str], *names: str) -> str | None:
    """The last value of a flag, written `--flag value` or `--flag=value`; None when it is not there."""
    value = None
    listed = list(args)
    for at, arg in enumerate(listed):
        if flag_name(arg) in names:
            _, equals, given = arg.partition("=")
            value = given if equals else listed[at + 1] if at + 1 < len(listed) else None
    return value


def flag_count(args: Collection[str], name: str, default: int) -> int:
    """A flag's value as a number above 0; `default` when it is not there, or is none."""
    given = flag_value(args, name)
    return int(given) if given is not None and given.isdigit() and int(given) > 0 else default


def _means(flag: str, name: str) -> bool:
    if name.startswith("--"):
        return flag == name or flag.startswith(f"{name}.") or (len(flag) > 2 and name.startswith(flag))
    return flag.startswith(name) and not flag.startswith("--")


def _interpreter_problem(interpreter: str, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(field="interpreter", value=interpreter, problem=problem, remedy=remedy)
