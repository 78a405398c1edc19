"""``cocor-train``: pre-train an image encoder.

    main -> launch.run -> on every rank: cocor.loop.train

The launcher needs none of what its ranks need, and a mistake in a flag should be told at once: so PyTorch and the rest
are imported where they are used.
"""

import sys
from collections.abc import Sequence
from typing import Any

from cocor import launch
from cocor.config import Config, load


def main(argv: Sequence[str] | None = None) -> int:
    """The console command; returns the exit code (2 for a user's mistake)."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return launch.command("cocor-train", lambda: launch.run(load(arguments), arguments, _train, "cocor.train"))


def _train(config: Config, world: Any) -> None:
    from cocor.loop import train

    train(config, world)


if __name__ == "__main__":
    sys.exit(main())
