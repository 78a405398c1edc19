import pytest
from helpers.prep_cases import Prep


@pytest.fixture
def prep(capsys: pytest.CaptureFixture[str]) -> Prep:
    return Prep(capsys)
