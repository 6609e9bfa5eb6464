"""One session on one worker, while that worker is not much more loaded than the least loaded one.

A session's first worker follows from a hash of its name and the workers' (rendezvous), so that several routers agree
without talking and a worker that leaves moves its own sessions only. Where it went in fact is remembered.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from router.core.policies.policy import Policy, Rng, balanced, least
from router.core.seat import Seat
from router.core.want import Want


class Sticky(Policy):
    def __init__(self, most_extra: float, most_ratio: float, by: str, max_sessions: int) -> None:
        self._most_extra = most_extra
        self._most_ratio = most_ratio
        self._by_request = by == "request_id"
        self._max_sessions = max_sessions
        self._moved: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._moved)

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        key = self._key(want)
        if not key:
            return least(seats, now)
        at = self._moved.get(key)
        kept = next((seat for seat in seats if seat.id == at), None) if at is not None else None
        if kept is None:
            kept = max(seats, key=lambda seat: _affinity(key, seat.worker.worker_id))
        return kept if balanced(kept, seats, now, self._most_extra, self._most_ratio) else least(seats, now)

    def sent(self, seat: Seat, want: Want) -> None:
        key = self._key(want)
        if key:
            self._moved[key] = seat.id
            self._moved.move_to_end(key)
            if len(self._moved) > self._max_sessions:
                self._moved.popitem(last=False)

    def _key(self, want: Want) -> str:
        return want.request_id if self._by_request else want.session


def _affinity(key: str, worker_id: str) -> bytes:
    return blake2b(f"{key}\0{worker_id}".encode(), digest_size=8).digest()
