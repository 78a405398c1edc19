"""The command ``cocor-prep``, run in the process of a test."""

import pytest

from helpers.hostile import time_limit
from loaders.prep.cli import main


class Prep:
    """Runs ``cocor-prep``; with one worker, as starting more takes longer than most tests."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object) -> str:
        """What a command prints that must succeed."""
        code, out, error = self.run(*words)
        assert code == 0, error
        return out

    def refused(self, *words: object) -> str:
        """The one line of a command that must be refused."""
        code, out, error = self.run(*words)
        assert code == 2 and error.startswith("cocor-prep: ") and error.count("\n") == 1 and not out
        return error

    def run(self, *words: object) -> tuple[int, str, str]:
        """Exit code, output and errors of a command."""
        arguments = list(map(str, words))
        if words and words[0] in ("scan", "convert", "subset", "verify") and "--workers" not in arguments:
            arguments += ["--workers", "1"]
        self._capsys.readouterr()
        with time_limit():
            code = main(arguments)
        return code, *self._capsys.readouterr()
