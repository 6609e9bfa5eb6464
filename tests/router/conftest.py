"""What `Generate` promises, it promises on both fronts."""

from collections.abc import Iterator

import pytest

from tests.router import fakes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.endswith("test_grpc_front"):
        metafunc.fixturenames.append("generate_front")
        metafunc.parametrize("generate_front", ["h2", "grpcio"], indirect=True)


@pytest.fixture
def generate_front(request: pytest.FixtureRequest) -> Iterator[str]:
    before, fakes.GENERATE_FRONT[0] = fakes.GENERATE_FRONT[0], request.param
    yield request.param
    fakes.GENERATE_FRONT[0] = before
