"""The order of the whole suite, and where its random examples come from.

What is quick comes first, what needs a real engine or a system container last. Examples are the same in every run;
`pytest --hypothesis-profile search` looks for new ones.
"""

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("search", max_examples=2000, print_blob=True, deadline=None)
settings.load_profile("repeatable")


def _cost(item: pytest.Item) -> int:
    if item.get_closest_marker("heavy"):
        return 2
    return 1 if item.get_closest_marker("slow") else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_cost)  # stable: within a class the files keep their order
