"""Run ``cocor-export``: write a trained encoder for other programs, and print the lines that load each file.

cocor-export runs/moco --to timm onnx --output exported/
cocor-export runs/moco --push OWNER/NAME
"""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocor import cli
from cocor.eval.cli import add_encoder_flags
from cocor.run_dir import check_pair
from loaders.arguments import Parser
from loaders.errors import UserError
from loaders.files import check_folder

_FORMATS = ("timm", "torchvision", "hub", "onnx", "detectron2")


if TYPE_CHECKING:
    from cocor.weights.load import Encoder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return cli.command("cocor-export", lambda: _export(_parser().parse_all(given)))


def _parser() -> Parser:
    parser = Parser("cocor-export", description="Write a trained encoder for other programs.", allow_abbrev=False)
    parser.add_argument("weights", metavar="WEIGHTS", help="a run's folder, or a file of weights of any origin")
    parser.add_argument("--to", nargs="+", choices=[*_FORMATS, "all", "safetensors"], metavar="FORMAT", default=[],
                        help=f"{', '.join(_FORMATS)} (default: timm), or all that can hold the encoder")  # fmt: skip
    parser.add_argument("--push", metavar="OWNER/NAME", help="write --to hub, and push it to the Hugging Face Hub")
    parser.add_argument("--output", type=Path, default=Path("exported"), metavar="FOLDER", help="default: exported")
    parser.add_argument("--name", help="of the files (default: the run's)")
    add_encoder_flags(parser)
    parser.add_argument("--force", action="store_true", help="replace existing files")
    return parser


def _export(options: argparse.Namespace) -> None:
    check_pair()
    check_folder("--output", options.output)
    from cocor.eval.export.formats import FORMATS
    from cocor.eval.export.hub import check_push
    from cocor.eval.options import encoder_hints
    from cocor.weights.load import load_encoder

    if options.push:
        check_push(options.push)
    encoder = load_encoder(options.weights, **encoder_hints(options))
    print(encoder.describe())
    name = options.name or encoder.name.replace("/", "-").replace(":", "-")
    outputs = {form: options.output / f"{name}{FORMATS[form].suffix}" for form in _forms(options)}
    existing = [path for path in outputs.values() if path.exists()]
    if existing and not options.force:
        raise UserError(f"{existing[0]} exists; use --force to replace it, or another --name")
    refused = _write(encoder, outputs)
    if "hub" in outputs and "hub" not in refused:
        _finish_hub(encoder, outputs["hub"], options.push)
    if refused and "all" not in options.to:
        raise UserError("; ".join(refused.values()))
    for reason in refused.values():
        print(f"not written: {reason}")


def _write(encoder: "Encoder", outputs: Mapping[Any, Path]) -> dict[str, str]:
    """Write all formats that can hold ``encoder``, with the lines that load each. Returns why others are not."""
    from cocor.eval.export.formats import FORMATS, export

    refused = {}
    for form, path in outputs.items():
        try:
            export(encoder, form, path)
        except UserError as error:
            refused[form] = str(error)
            continue
        print(f"{form}: {path}, loaded back and compared. To load it:")
        print(textwrap.indent(FORMATS[form].lines(encoder, path), "    "), end="")
    return refused


def _finish_hub(encoder: "Encoder", folder: Path, name: str | None) -> None:
    """Push ``folder`` as ``name``, or say how; say what timm cannot load."""
    from cocor.eval.export.hub import push
    from cocor.eval.export.rebuild import timm_knows

    if not timm_knows(encoder):
        print(
            "hub: timm cannot build the small stem by name: hf-hub: and local-dir: do not load it, the lines above do"
        )
    if name:
        print(f"hub: pushed to {push(folder, name)}; its card has no license yet: fill it in there")
    else:
        print(f"hub: fill in the license in {folder / 'README.md'}, then: hf upload OWNER/NAME {folder}")


def _forms(options: argparse.Namespace) -> list[Any]:
    """List the formats to write, each once, in the order of the table."""
    wanted = {"hub" if form == "safetensors" else form for form in options.to}  # its name in version 0.1
    wanted |= {"hub"} if options.push else set()
    return [form for form in _FORMATS if form in (wanted or {"timm"}) or "all" in wanted]


if __name__ == "__main__":
    sys.exit(main())
