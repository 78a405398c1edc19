"""Command-line interface ``cocor-prep``.

Exit codes: 0 done, 2 a mistake in the call or damage in the data, 130 Ctrl-C, 141 broken pipe, 143 SIGTERM.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loaders.arguments import Parser, fraction, seed, whole
from loaders.datasets.beton import LARGEST_SIDE, is_beton
from loaders.datasets.decode import MAX_PIXELS
from loaders.errors import UserError, explain
from loaders.prep.output import refuse_existing, refuse_overlap
from loaders.prep.source import Source
from loaders.prep.sources import open_source
from loaders.text import counted, print_everything, printable

_MOST_WORKERS = 1024
_SOURCES = "a folder, ILSVRC's tars, a folder of WebDataset tars or parquet shards, or a .beton file"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    print_everything()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    try:
        options = _parser().parse_all(arguments)
        return int(options.run(options))
    except UserError as mistake:
        print(f"cocor-prep: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, MemoryError, RuntimeError) as fault:
        lack = explain(fault)
        if not lack and not isinstance(fault, OSError):
            raise
        print(f"cocor-prep: {lack or fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cocor-prep: stopped; nothing was kept", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _parser() -> Parser:
    parser = Parser("cocor-prep", description="Prepare image data sets for cocor-train.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    scan = _command(commands, "scan", _scan, "decode every image; report what is damaged or unusual")
    _source_arguments(scan, on_error="skip", decodes=True)
    scan.add_argument("--report", type=Path, metavar="FILE", help="write a JSON line for every image")
    _output_arguments(scan, workers=True)

    convert = _command(commands, "convert", _convert, "make a .beton file, or class folders of JPEGs")
    subset = _command(commands, "subset", _convert, "copy the images of some classes to a folder or .beton file")
    for command in (convert, subset):
        _source_arguments(command, on_error="stop", decodes=True)
        command.add_argument("output", type=Path, metavar="OUTPUT", help="NAME.beton for FFCV and DALI, else a folder")
        text = "only these classes: imagenet100, or a file with one a line"
        command.add_argument("--classes", metavar="LIST", required=command is subset, help=text)
        _output_arguments(command, workers=True)
    text = "shrink larger images; never enlarges"
    convert.add_argument("--shorter-side", type=whole(1, LARGEST_SIDE), metavar="PIXELS", help=text)
    text = "of JPEGs that must be encoded anew (default 95)"
    convert.add_argument("--quality", type=whole(1, 100), default=95, help=text)
    convert.add_argument("--raw", action="store_true", help=".beton: store pixels; about 10 times larger, no decoding")
    subset.set_defaults(shorter_side=None, quality=95, raw=False)

    labels = _command(commands, "labels", _labels, "choose, or check, the few images that may show their labels")
    _source_arguments(labels, on_error="skip")
    text = "of every class, at least one image (default 0.01)"
    labels.add_argument("--fraction", type=fraction, default=0.01, help=text)
    labels.add_argument("--seed", type=seed, default=0, help="another seed chooses other images (default 0)")
    labels.add_argument("--output", type=Path, metavar="FILE", help="the text file to write")
    labels.add_argument("--check", type=Path, metavar="FILE", help="hold an existing list against the data instead")
    _output_arguments(labels, workers=False)

    verify = _command(commands, "verify", _verify, "check a prepared set against its checksums, image by image")
    text = "a .beton file or folder made by cocor-prep convert"
    verify.add_argument("path", type=Path, metavar="PREPARED", help=text)
    verify.add_argument("--workers", type=whole(1, _MOST_WORKERS), help="processes (default: one a core)")

    info = _command(commands, "info", _info, "show what is in a data set")
    _source_arguments(info)
    info.add_argument("--sheet", type=Path, metavar="PNG", help="also write a contact sheet of example images")
    _output_arguments(info, workers=False)
    return parser


def _command(commands, name: str, run, text: str) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def]
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _source_arguments(parser: argparse.ArgumentParser, on_error: str = "", decodes: bool = False) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help=_SOURCES)
    parser.add_argument("--labels", type=Path, metavar="FILE", help="labels of images without class folders")
    parser.add_argument("--allow-empty", action="store_true", help="accept class folders without images")
    if on_error:
        text = f"at an unusable image (default {on_error})"
        parser.add_argument("--on-error", choices=("stop", "skip"), default=on_error, help=text)
    if decodes:
        text = f"an image with more is unusable (default {MAX_PIXELS:,})"
        parser.add_argument("--max-pixels", type=whole(1, MAX_PIXELS), default=MAX_PIXELS, help=text)


def _output_arguments(parser: argparse.ArgumentParser, workers: bool) -> None:
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    if workers:
        parser.add_argument("--workers", type=whole(1, _MOST_WORKERS), help="processes (default: one a core)")


def _open(options: argparse.Namespace) -> Source:
    workers = getattr(options, "workers", None)
    source = open_source(options.source, options.labels, workers=workers, allow_empty=options.allow_empty)
    if getattr(options, "classes", None):
        from loaders.prep.source import read_classes

        source = source.keep_classes(read_classes(options.classes))
    return source


def _check_output(options: argparse.Namespace, output: Path | None) -> None:
    """Refuse early an output that may not be made or replaces its own source."""
    if output is None:
        return
    lists = (Path(name) for key in ("labels", "classes") if (name := getattr(options, key, None)) is not None)
    refuse_overlap(output, options.source, *lists)
    refuse_existing(output, options.force)


def _scan(options: argparse.Namespace) -> int:
    from loaders.prep.convert import unusable
    from loaders.prep.output import staged
    from loaders.prep.scan import print_summary, scan

    _check_output(options, options.report)
    source = _open(options)
    stop = options.on_error == "stop"
    with ExitStack() as stack:
        file = None
        if options.report:
            work = stack.enter_context(staged(options.report, folder=False, force=options.force))
            file = stack.enter_context(work.open("w", encoding="ascii"))
        summary = scan(source, options.max_pixels, options.workers, stop, file)
    print_summary(source, summary)
    if summary.rejected and stop:
        raise unusable(source, *summary.rejected[0])
    return 0


def _convert(options: argparse.Namespace) -> int:
    from loaders.prep.convert import Target, convert
    from loaders.prep.encode import Settings

    target: Target = "beton" if is_beton(options.output) else "folder"
    if options.raw and target == "folder":
        raise UserError(f"--raw: a folder holds image files; name an output that ends in .beton, not {options.output}")
    _check_output(options, options.output)
    settings = Settings(options.shorter_side, options.quality, options.raw, options.max_pixels)
    how = {"workers": options.workers, "on_error": options.on_error, "force": options.force}
    done = convert(_open(options), options.output, target, settings, **how)
    treatments = ", ".join(f"{count:,} {name}" for name, count in done.treatments.items())
    without = f", {done.unlabelled:,} without a class" if done.unlabelled else ""
    print(f"{printable(options.output)}: {counted(done.images, 'image')} ({treatments}){without}")
    for name, reason in done.skipped:
        print(f"skipped {printable(name)}: {reason}")
    return 0


def _labels(options: argparse.Namespace) -> int:
    from loaders.prep.convert import unusable
    from loaders.prep.labels import check_labels, write_labels

    if (options.check is None) == (options.output is None):
        raise UserError("labels: give either --output FILE to write a list or --check FILE to check one")
    _check_output(options, options.output)
    source = _open(options)
    if source.faults and options.on_error == "stop":
        raise unusable(source, *source.faults[0])
    if options.output is not None:
        count = write_labels(source, options.fraction, options.seed, options.output, options.force)
        classes = counted(len(source.classes), "class")
        print(f"{printable(options.output)}: {count:,} of {counted(len(source), 'image')}, {classes}")
        if source.faults:
            name, reason = source.faults[0]
            print(f"note: {len(source.faults):,} unusable images left out, such as {printable(name)}: {reason}")
        return 0
    checked = check_labels(options.check, source)
    spread = f"{checked.per_class.min():,} to {checked.per_class.max():,} a class"
    print(f"{printable(options.check)}: {counted(checked.images, 'image')} of this data set, {spread}")
    for remark in checked.remarks:
        print(f"note: {remark}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from loaders.prep.verify import verify

    count, faults = verify(options.path, options.workers)
    for name, fault in faults:
        print(f"{printable(name)}: {fault}")
    print(f"{printable(options.path)}: {counted(count, 'image')}, {counted(len(faults), 'fault')}")
    return 2 if faults else 0


def _info(options: argparse.Namespace) -> int:
    from loaders.prep.info import contact_sheet, describe_source

    _check_output(options, options.sheet)
    source = _open(options)
    lines = describe_source(source)
    width = max(len(heading) for heading, _ in lines)
    for heading, text in lines:
        print(f"{heading:<{width}}  {text}")
    if options.sheet:
        shown = contact_sheet(source, options.sheet, options.force)
        print(f"{printable(options.sheet)}: {counted(shown, 'image')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
