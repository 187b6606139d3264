"""Services in each mode, closed and checked at the end."""

from collections.abc import Iterator

import pytest

from support.fake_service import FakeService


@pytest.fixture(params=["inflight", "static", "dynamic"])
def any_mode(request: pytest.FixtureRequest) -> Iterator[FakeService]:
    fixture = FakeService(request.param)
    yield fixture
    fixture.service.close()
    fixture.engine.check_integrity()


@pytest.fixture
def inflight() -> Iterator[FakeService]:
    fixture = FakeService("inflight")
    yield fixture
    fixture.service.close()
    fixture.engine.check_integrity()
