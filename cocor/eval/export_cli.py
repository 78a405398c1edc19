"""Run ``cocor-export``: write a trained encoder for other programs.

cocor-export runs/moco --to timm detectron2 --output exported/
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cocor import cli
from cocor.eval.cli import add_encoder_flags
from cocor.run_dir import check_pair
from loaders.arguments import Parser
from loaders.errors import UserError
from loaders.files import check_folder

_FORMATS = ("timm", "torchvision", "safetensors", "detectron2")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return cli.command("cocor-export", lambda: _export(_parser().parse_all(given)))


def _parser() -> Parser:
    parser = Parser("cocor-export", description="Write a trained encoder for other programs.", allow_abbrev=False)
    parser.add_argument("weights", metavar="WEIGHTS", help="a run's folder, or a file of weights of any origin")
    parser.add_argument("--to", nargs="+", choices=_FORMATS, default=["timm"], help="formats (default timm)")
    parser.add_argument("--output", type=Path, default=Path("exported"), metavar="FOLDER", help="default: exported")
    parser.add_argument("--name", help="of the files (default: the run's)")
    add_encoder_flags(parser)
    parser.add_argument("--force", action="store_true", help="replace existing files")
    return parser


def _export(options: argparse.Namespace) -> None:
    check_pair()
    check_folder("--output", options.output)
    from cocor.eval.export import FORMATS, check_possible, export
    from cocor.weights.load import load_encoder

    encoder = load_encoder(options.weights, which=options.which, architecture=options.backbone, stem=options.stem)
    print(encoder.describe())
    name = options.name or encoder.name.replace("/", "-").replace(":", "-")
    outputs = {form: options.output / f"{name}{FORMATS[form][0]}" for form in options.to}
    existing = [path for path in outputs.values() if path.exists()]
    if existing and not options.force:
        raise UserError(f"{existing[0]} exists; use --force to replace it, or another --name")
    for form in outputs:  # before any is written
        check_possible(encoder, form)
    for form, path in outputs.items():
        print(f"{form}: {export(encoder, form, path)}, loaded back and compared")


if __name__ == "__main__":
    sys.exit(main())
