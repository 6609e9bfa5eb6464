"""Whether an engine gets on with its work: busy is not dead, and an answer to a probe is not work.

Two things show it: what the engine counts, and what the shim relays. Engines that count tokens only when a request ends
(SGLang) are judged by their running event streams alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Facts:
    """What shim and engine tell at one moment. None: nobody tells.

    `streams`: requests in flight whose event stream has begun; `relayed_bytes`: of answers; `counts_live`: the engine
    counts tokens as it makes them.
    """

    in_flight: int = 0
    streams: int = 0
    relayed_bytes: int = 0
    total_served: int = 0
    generation_tokens: int | None = None
    prompt_tokens: int | None = None
    kv_use: float | None = None
    counts_live: bool = False

    def differ(self, other: "Facts") -> bool:
        """Something was done between the two. What one of them does not know says nothing."""
        counted = (
            (self.relayed_bytes, other.relayed_bytes),
            (self.total_served, other.total_served),
            (self.generation_tokens, other.generation_tokens),
            (self.prompt_tokens, other.prompt_tokens),
            (self.kv_use, other.kv_use),
        )
        return any(a != b for a, b in counted if a is not None and b is not None)

    @property
    def visible_work(self) -> bool:
        """There is work whose progress would show."""
        return self.streams > 0 or (self.in_flight > 0 and self.counts_live and self.generation_tokens is not None)


@dataclass(slots=True)
class Progress:
    """Of one engine. `note` is called at each probe; times are seconds of one clock."""

    _last: Facts | None = None
    _moved_at: float = 0.0
    moved: bool = False

    def note(self, now: float, facts: Facts, *, held: bool = False) -> None:
        """`held`: it is paused or changed on purpose, so that nothing moves."""
        self.moved = self._last is not None and facts.differ(self._last)
        if held or self.moved or self._last is None or not facts.visible_work:
            self._moved_at = now
        self._last = facts

    def stalled_s(self, now: float) -> float:
        """How long it has had visible work and has done nothing. 0 while it gets on."""
        return now - self._moved_at if self._last is not None and self._last.visible_work else 0.0
