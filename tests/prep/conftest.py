import pytest
from helpers.prep_command import Prep


@pytest.fixture
def prep(capsys: pytest.CaptureFixture[str]) -> Prep:
    return Prep(capsys)
