"""Messages between processes: at once and reliable by default; delayed, lost, doubled and out of order on request."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.agenda import Agenda


@dataclass(frozen=True, slots=True)
class Conditions:
    """How bad the network is. Probabilities are per message, delays in seconds."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0  # probability of being late by up to `late_s`, which also puts it behind later ones
    late_s: float = 0.0


class Network:
    """`cut` holds the peers that no message reaches or leaves."""

    def __init__(self, agenda: Agenda, rng: random.Random, conditions: Conditions | None = None) -> None:
        self.agenda = agenda
        self.rng = rng
        self.conditions = conditions or Conditions()
        self.cut: set[str] = set()

    @property
    def conditions(self) -> Conditions:
        return self._conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._perfect = conditions == Conditions()

    def send(self, peer: str, call: Callable[..., Any], *args: Any) -> None:
        """One message from or to `peer`, without any promise."""
        conditions = self._conditions
        if peer in self.cut:
            return
        if self._perfect:
            self.agenda.at(self.agenda.now, call, *args)
            return
        copies = 1
        if conditions.loss and self.rng.random() < conditions.loss:
            return
        if conditions.duplicate and self.rng.random() < conditions.duplicate:
            copies = 2
        for _ in range(copies):
            self.agenda.after(self._delay_s(), call, *args)

    def _delay_s(self) -> float:
        conditions, delay = self._conditions, self._conditions.latency_s
        if conditions.jitter_s:
            delay += self.rng.random() * conditions.jitter_s
        if conditions.late and self.rng.random() < conditions.late:
            delay += self.rng.random() * conditions.late_s
        return delay


class Stream:
    """Messages in order and complete until it breaks; what was under way is lost then."""

    def __init__(self, network: Network, peer: str) -> None:
        self.network = network
        self.peer = peer
        self.open = True
        self._last_at = 0.0

    def send(self, call: Callable[..., Any], *args: Any) -> None:
        if self.peer in self.network.cut:
            self.open = False  # nobody learns of it but by silence
        if not self.open:
            return
        self._last_at = max(self._last_at, self.network.agenda.now + self.network._delay_s())
        self.network.agenda.at(self._last_at, self._deliver, call, args)

    def _deliver(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.open and self.peer not in self.network.cut:
            call(*args)
        else:
            self.open = False
