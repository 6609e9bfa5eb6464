"""The tools of the example: web search and page fetch, by Serper and Jina, or from a file without any network."""

import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from examples.trajectories.formats import Tool, ToolCall

SEARCH = Tool("search", "Search the web; titles, addresses and short texts.", {"query": "What to search for."})
FETCH = Tool("fetch", "Read a page as plain text.", {"url": "Address of the page."})
TIMEOUT_S = 30.0
MAX_CHARS = 8000  # of one result

Run = Callable[[Mapping[str, Any]], str]


class Tools:
    """Tools by name. A failed one answers with its problem: the model may try something else."""

    def __init__(self, runs: Mapping[str, tuple[Tool, Run]]) -> None:
        self._runs = dict(runs)

    @property
    def described(self) -> list[Tool]:
        return [tool for tool, _ in self._runs.values()]

    def run(self, call: ToolCall) -> str:
        if call.problem:
            return f"Error: {call.problem}"
        if call.name not in self._runs:
            return f"Error: there is no tool {call.name}. There are: {', '.join(self._runs)}."
        tool, run = self._runs[call.name]
        missing = [name for name in tool.parameters if not isinstance(call.arguments.get(name), str)]
        if missing:
            return f"Error: {', '.join(missing)} must be given as text."
        try:
            return run(call.arguments)[:MAX_CHARS] or "Nothing found."
        except (OSError, ValueError, KeyError) as error:
            return f"Error: {error}"


def web(environ: Mapping[str, str] = os.environ) -> Tools:
    """Serper and Jina, with SERPER_API_KEY and (optional) JINA_API_KEY. Raises ValueError without the first."""
    key, reader_key = environ.get("SERPER_API_KEY", ""), environ.get("JINA_API_KEY", "")
    if not key:
        raise ValueError("SERPER_API_KEY is not set; set it, or use --tools offline")

    def search(arguments: Mapping[str, Any]) -> str:
        body = json.dumps({"q": arguments["query"], "num": 8}).encode()
        headers = {"X-API-KEY": key, "Content-Type": "application/json"}
        found = json.loads(_get("https://google.serper.dev/search", headers, body))
        rows = found.get("organic", [])
        return "\n\n".join(f"{row.get('title')}\n{row.get('link')}\n{row.get('snippet', '')}" for row in rows)

    def fetch(arguments: Mapping[str, Any]) -> str:
        url = str(arguments["url"])
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no web address")
        return _get("https://r.jina.ai/" + url, {"Authorization": f"Bearer {reader_key}"} if reader_key else {})

    return Tools({"search": (SEARCH, search), "fetch": (FETCH, fetch)})


def offline(pages: Path) -> Tools:
    """From a JSON file {address: {"title", "text"}}: search finds pages that share words with the query."""
    known: dict[str, dict[str, str]] = json.loads(pages.read_text())

    def search(arguments: Mapping[str, Any]) -> str:
        words = {word for word in str(arguments["query"]).lower().split() if len(word) > 2}
        hits = {url: len(words & set(f"{p['title']} {p['text']}".lower().split())) for url, p in known.items()}
        best = sorted((url for url in hits if hits[url]), key=lambda url: (-hits[url], url))[:5]
        return "\n\n".join(f"{known[url]['title']}\n{url}\n{known[url]['text'][:160]}" for url in best)

    def fetch(arguments: Mapping[str, Any]) -> str:
        return known[str(arguments["url"])]["text"]

    return Tools({"search": (SEARCH, search), "fetch": (FETCH, fetch)})


def _get(url: str, headers: Mapping[str, str], body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, dict(headers))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return bytes(answer.read(1 << 20)).decode(errors="replace")
