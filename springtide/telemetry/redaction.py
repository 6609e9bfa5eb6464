"""Takes secrets out of text before it reaches a log line or a span."""

import os
import re
from collections.abc import Iterable, Mapping

MASK = "[redacted]"

# Names whose values never leave the process, in the environment, in arguments and in structured fields.
_NAME = r"[\w.-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|otlp[_-]headers)"
# Names that look like one of those and are counts or paths.
_HARMLESS = re.compile(
    r"(?i)(?:[_-]|^)(?:max|min|prompt|completion|generation|first|num|total|new)[\w-]*tokens?$|_(?:path|file)$"
)
_SECRET_NAME = re.compile(rf"(?i)^{_NAME}$|^(?:proxy-)?authorization$|^cookie$")
_ASSIGNMENT = re.compile(rf"(?i)(?P<name>\b{_NAME})(?P<sep>[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&}}]+)")
_HEADER = re.compile(
    r"(?i)(\b(?:proxy-)?authorization\b[\"']?\s*[=:]\s*[\"']?)(?:(?:bearer|basic|digest|token)\s+)?[^\s\"',;}]+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{8,}")
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]+:)[^\s/@]+(@)")

_MIN_LENGTH = 8  # shorter values would mask ordinary words

_known_values: tuple[str, ...] = ()


def is_secret_name(name: str) -> bool:
    """Whether a field, header or variable of this name holds a secret."""
    return bool(_SECRET_NAME.match(name)) and not _HARMLESS.search(name)


def learn_secrets(environ: Mapping[str, str] | None = None) -> None:
    """Remembers the values of secret-named environment variables, so that they are masked wherever they appear."""
    global _known_values
    source = os.environ if environ is None else environ
    _known_values = _longest_first(v for k, v in source.items() if is_secret_name(k) and len(v) >= _MIN_LENGTH)


def redact(text: str) -> str:
    """The text with secrets replaced by a mask."""
    for value in _known_values:
        if value in text:
            text = text.replace(value, MASK)
    if "=" in text or ":" in text:
        text = _HEADER.sub(rf"\g<1>{MASK}", text)
        text = _URL_PASSWORD.sub(rf"\g<1>{MASK}\g<2>", text)
        text = _ASSIGNMENT.sub(_mask_assignment, text)
    return _BEARER.sub(rf"\g<1> {MASK}", text)


def _mask_assignment(match: re.Match[str]) -> str:
    if _HARMLESS.search(match["name"]):
        return match[0]
    return f"{match['name']}{match['sep']}{MASK}"


def _longest_first(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values), key=len, reverse=True))
