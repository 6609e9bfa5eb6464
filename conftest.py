"""The order of the whole suite: what is quick first, what needs a real engine or a system container last."""

import pytest


def _cost(item: pytest.Item) -> int:
    if item.get_closest_marker("heavy"):
        return 2
    return 1 if item.get_closest_marker("slow") else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_cost)  # stable: within a class the files keep their order
