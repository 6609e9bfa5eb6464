"""Labels that a request asks for: a worker must have all of them, with these values; more do not matter (RT7)."""

from collections.abc import Iterable

from springtide.model.routing import RoutedWorker


def has_labels(worker: RoutedWorker, labels: Iterable[tuple[str, str]]) -> bool:
    return all(worker.labels.get(key) == value for key, value in labels)
