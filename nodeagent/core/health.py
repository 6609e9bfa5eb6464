"""Whether an engine's probes fail: what they say, whether its shim answers, and whether its work gets on."""

from dataclasses import dataclass, field

from nodeagent.core.progress import Facts, Progress


@dataclass(slots=True)
class Health:
    """Of one engine. `stall_timeout_s` 0: work that stands still is no failure. `failures`: probes in a row."""

    stall_timeout_s: float
    failures: int = 0
    _progress: Progress = field(default_factory=Progress)

    def judge(self, now: float, facts: Facts, trouble: str, silence: str, *, held: bool = False) -> str:
        """Counts a probe. Returns what makes it a failure, for people; nothing when it is none.

        Busy is not dead: an engine that answers late and gets on is no failure, one that answers and does nothing of
        its work is. `trouble`: of the engine; `silence`: of its shim, behind which no request reaches it; `held`: it
        is paused on purpose.
        """
        self._progress.note(now, facts, held=held)
        stalled_s = self._progress.stalled_s(now)
        if not silence and not trouble and self.stall_timeout_s and stalled_s >= self.stall_timeout_s:
            trouble = f"{facts.in_flight} requests run and nothing has come of them for {stalled_s:.0f} s"
        if silence or (trouble and not self._progress.moved):
            self.failures += 1
            return silence or trouble
        if not trouble:
            self.failures = 0
        return ""
