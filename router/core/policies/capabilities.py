"""Labels that a request asks for: a worker must have all of them, with these values; more do not matter (RT7).

As a policy, `capabilities` also spares the workers that others ask for: of those that fit, a request goes to one that
the fewest of the other asked sets of labels could use, while that is not much more loaded than the least loaded one. So
requests that need nothing leave the workers with a rare label alone, and these can stop when nobody asks for them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from router.core.policies.policy import Policy, Rng, balanced, least
from router.core.seat import Seat
from router.core.want import Want
from springtide.model.routing import RoutedWorker

_MOST_SETS = 32
Labels = tuple[tuple[str, str], ...]


def has_labels(worker: RoutedWorker, labels: Iterable[tuple[str, str]]) -> bool:
    return all(worker.labels.get(key) == value for key, value in labels)


class Capabilities(Policy):
    def __init__(self, most_extra: float, most_ratio: float) -> None:
        self._most_extra = most_extra
        self._most_ratio = most_ratio
        self._asked: OrderedDict[Labels, None] = OrderedDict()
        """Sets that requests asked for, the latest last."""

    def choose(self, seats: Sequence[Seat], want: Want, now: float, rng: Rng) -> Seat:
        others = [labels for labels in self._asked if labels != want.needs.labels]
        if not others:
            return least(seats, now)
        wanted_by = [sum(has_labels(seat.worker, labels) for labels in others) for seat in seats]
        fewest = min(wanted_by)
        spared = least((seat for seat, count in zip(seats, wanted_by, strict=True) if count == fewest), now)
        return spared if balanced(spared, seats, now, self._most_extra, self._most_ratio) else least(seats, now)

    def sent(self, seat: Seat, want: Want) -> None:
        labels = want.needs.labels
        if labels:
            self._asked[labels] = None
            self._asked.move_to_end(labels)
            if len(self._asked) > _MOST_SETS:
                self._asked.popitem(last=False)
