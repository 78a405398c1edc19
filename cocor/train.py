"""``cocor-train``: pre-train an image encoder.

    main -> launch.run -> on every rank: cocor.loop.train

Everything is imported where it is used: the launcher needs little of what its ranks need, mistakes in flags should be
reported at once, and signals handled from the first moment.
"""

import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; returns the exit code (2 for a user's mistake)."""
    from cocor.distributed import launch

    arguments = sys.argv[1:] if argv is None else list(argv)
    return launch.command("cocor-train", lambda: _run(arguments), ranks=True)


def _run(arguments: list[str]) -> None:
    from cocor import run_dir, versions
    from cocor.config import checks
    from cocor.config.resolve import read
    from cocor.distributed import launch, signals

    with signals.at_once(launch.leave_at_once):
        asked, keys = read(arguments)
        if launch.speaks():
            for line in checks.warnings(asked, keys, launch.launched_elsewhere()):
                print(f"cocor-train: warning: {line}", file=sys.stderr)
        if launch.begins() and asked.trains:
            run_dir.check(asked)
        if launch.begins() and asked.profile:
            run_dir.check_trace(asked)

        def train(config: Any, world: Any) -> None:
            versions.check_pair()
            from cocor.loop import train

            train(config, world, asked)

        launch.run(asked, arguments, train, "cocor.train")


if __name__ == "__main__":
    from cocor.cli import train

    sys.exit(train())
