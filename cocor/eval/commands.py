"""Run the sub-commands of ``cocor-eval``: features -> probe -> report, picture."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cocor.distributed import collectives
from cocor.distributed.env import RankEnv
from cocor.eval import embeddings, figures, options
from cocor.eval.datasets.protocols import FINETUNE, KNN_K, RECIPES, WAY_SHOTS
from cocor.eval.datasets.splits import Splits
from cocor.eval.detect.command import detection, draw_detections
from cocor.eval.features import Features, features_of, joined, summary
from cocor.eval.probes import consistency as consistency_probe
from cocor.eval.probes import fewshot as few
from cocor.eval.probes import finetune as tuning
from cocor.eval.probes import invariance as invariance_probe
from cocor.eval.probes import spectrum as spectra
from cocor.eval.probes.knn import knn_curve
from cocor.eval.probes.linear import LinearResult, linear_probe
from cocor.eval.probes.retrieval import evenly_spread, retrieve, save_sheet
from cocor.eval.probes.sgd import sgd_probe, sgd_probe_on_crops, shared_batch, shortened
from cocor.eval.transfer import transfer as transfer_table
from cocor.log import set_up_logging
from cocor.weights.load import Encoder
from loaders.cpus import available_cores
from loaders.errors import UserError
from loaders.files import write_text
from loaders.prep.demo import or_demo


def on_device(args: argparse.Namespace, run: Callable[[argparse.Namespace], None]) -> None:
    """Call ``run`` on its device, as one rank if torchrun started several.

    Raises UserError if ``--gpu yes`` finds no GPU.
    """
    if args.gpu == "yes" and not torch.cuda.is_available():
        raise UserError("--gpu yes: PyTorch finds no GPU; leave the flag out to use the CPU")
    args.world = collectives.init(use_gpu=args.gpu != "no" and torch.cuda.is_available())
    set_up_logging(args.world)
    env = RankEnv.read()
    if args.workers is None and env.launcher is not None:  # the ranks of a machine share its cores
        args.workers = max(1, available_cores() // env.local_size)
    options.check_writable(args)
    if getattr(args, "data", None) is not None:
        args.data = or_demo(args.data)
    run(args)
    collectives.shutdown()


def linear(args: argparse.Namespace) -> None:
    """Run the linear probe, by full-batch L-BFGS or by SGD."""
    for name in ("epochs", "learn_from") if args.probe == "lbfgs" else ("metric", "iterations"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')}: not for --probe {args.probe}; leave it out")
    splits = options.chosen_splits(args)
    options.check_probe(splits, validates=args.probe == "lbfgs")
    encoder = options.chosen_encoder(args, args.weights[0])
    if args.probe != "lbfgs":
        return _linear_by_sgd(args, encoder, splits)
    train, val, test = options.features_of_splits(args, encoder, splits)
    if not args.world.main:
        return None
    metric, device = args.metric or splits.protocol.metric, args.world.device
    report = _about(encoder, splits, train=train, test=test)
    found = linear_probe(train, val, test, metric=metric, iterations=args.iterations or 1000, device=device)
    report["result"] = found.plain()
    picture = figures.draw_grid, _title(encoder, splits), found.trials, found.penalty
    return _finish(args, encoder, "linear", found.lines(), report, *picture)


def _linear_by_sgd(args: argparse.Namespace, encoder: Encoder, splits: Splits) -> None:
    settings, how = shortened(RECIPES[args.probe], args.epochs), options.extraction(args, encoder)
    if args.learn_from == "features":
        train, val, test = options.features_of_splits(args, encoder, splits)
        if not args.world.main:
            return
        found = sgd_probe(joined(train.flat(), val), test, settings, device=args.world.device)
    else:
        if args.crop == "ten":
            raise UserError("--crop ten: learn from these crops with --learn-from features")
        shared_batch(int((splits.learned_from().labels >= 0).sum()), how)
        test = features_of(encoder, splits.test, how, "test images")
        found = sgd_probe_on_crops(encoder, splits.learned_from(), test, settings, how)
    if args.world.main:
        report = _about(encoder, splits, test=test) | {"settings": asdict(settings), "result": asdict(found)}
        _finish(args, encoder, f"linear_{args.probe}", found.lines(), report)


def knn(args: argparse.Namespace) -> None:
    """Measure k-NN accuracy of test images by all others, or leave-one-out."""
    notes: tuple[str, ...] = ()
    if args.leave_one_out:
        dataset = options.chosen_images(args)
        options.check_leave_one_out(args, dataset)
        encoder = options.chosen_encoder(args, args.weights[0])
        bank = queries = features_of(encoder, dataset, options.extraction(args, encoder), "images").labelled()
        title = f"{encoder.name} on {dataset.root.name}"
        if alone := int((bank.labels.bincount() == 1).sum()):
            notes = (f"{alone:,} images are the only one of their class, so none of them can be right",)
    else:
        splits = options.chosen_splits(args)
        options.check_knn(args, splits)
        encoder = options.chosen_encoder(args, args.weights[0])
        train, val, queries = options.features_of_splits(args, encoder, splits)
        bank, queries = joined(train.flat(), val).labelled(), queries.labelled()
        title, notes = _title(encoder, splits), splits.notes
    most = len(bank) - args.leave_one_out
    chosen = args.k or sorted({min(k, most) for k in KNN_K})
    bank, queries = bank.to(args.world.device), queries.to(args.world.device)
    pairs = (queries.values, queries.labels, bank.values, bank.labels)
    found = knn_curve(*pairs, chosen, temperature=args.temperature, leave_one_out=args.leave_one_out)
    if args.world.main:
        curve = {k: result.accuracy for k, result in zip(chosen, found, strict=True)}
        lines = [f"k = {k}: top-1 {accuracy:.2%}" for k, accuracy in curve.items()]
        lines.append(f"{len(queries):,} queries, bank of {len(bank):,}, temperature {args.temperature}")
        lines += [f"note: {note}" for note in notes]
        report = _origin(encoder) | {"features": summary(bank), "temperature": args.temperature}
        report["result"] = [asdict(result) for result in found]
        picture = figures.draw_curve, title, "neighbours k", {encoder.name: curve}
        _finish(args, encoder, "knn", lines, report, *picture)


def fewshot(args: argparse.Namespace) -> None:
    """Run n-shot probes and N-way tasks."""
    splits = options.chosen_splits(args)
    options.check_fewshot(args, splits)
    encoder = options.chosen_encoder(args, args.weights[0])
    train, val, test = options.features_of_splits(args, encoder, splits, learn_from_val=True)
    if not args.world.main:
        return
    pool, device, metric = joined(train, val), args.world.device, args.metric or splits.protocol.metric
    shots = [few.shots(pool, test, n, seeds=range(args.seeds), metric=metric, device=device) for n in args.shots]
    counts = WAY_SHOTS if args.tasks else ()
    tasks = [few.episodes(test, n, ways=args.ways, tasks=args.tasks, device=device) for n in counts]
    report = _about(encoder, splits, train=train, test=test)
    report |= {"shots": [asdict(result) for result in shots], "tasks": [asdict(task) for task in tasks]}
    lines = [line for shot in shots for line in shot.lines()] + [line for task in tasks for line in task.lines()]
    _finish(args, encoder, "fewshot", lines, report, figures.draw_shots, _title(encoder, splits), shots)


def finetune(args: argparse.Namespace) -> None:
    """Train a copy of the whole network, once for each share of the labels."""
    options.check_one_process(args)
    options.refuse_ten_crops(args)
    splits = options.chosen_splits(args)
    options.check_probe(splits, validates=False)
    args.precision = args.precision or ("bf16" if args.world.device.type == "cuda" else "fp32")
    encoder, found = options.chosen_encoder(args, args.weights[0]), []
    for share in args.label_fraction:
        epochs = args.epochs or FINETUNE.epochs(share)
        settings = tuning.FinetuneSettings(share, epochs, args.lr, args.head_lr or args.lr, args.seed)
        folder, how = _folder(args, encoder) / f"finetune_{share:g}", options.extraction(args, encoder)
        found.append(tuning.finetune(encoder, splits, settings, how, folder, args.resume))
    report = _about(encoder, splits) | {"settings": {"lr": args.lr, "head_lr": args.head_lr or args.lr}}
    report["result"] = [asdict(one) for one in found]
    _finish(args, encoder, "finetune", [line for one in found for line in one.lines()], report)


def retrieval(args: argparse.Namespace) -> None:
    """Draw a contact sheet of the nearest training images of a few test images."""
    options.refuse_ten_crops(args)
    splits = options.chosen_splits(args)
    if args.neighbours > (count := len(splits.train)):
        raise UserError(f"--neighbours {args.neighbours}: the bank holds {count:,} images; use that or fewer")
    encoder = options.chosen_encoder(args, args.weights[0])
    how = options.extraction(args, encoder)
    bank, queries = features_of(encoder, splits.train, how, "bank"), features_of(encoder, splits.test, how, "queries")
    if not args.world.main:
        return
    train, test = splits.train.subset(bank.usable().numpy()), splits.test.subset(queries.usable().numpy())
    bank, queries = bank.subset(bank.usable()), queries.subset(queries.usable())
    rows, device = min(args.queries, len(queries)), args.world.device
    found = retrieve(queries, bank, rows=rows, k=args.neighbours, seed=args.seed, device=device)
    report = _about(encoder, splits, train=bank, test=queries) | {"result": found.plain(test, train)}
    _finish(args, encoder, "retrieval", found.lines(), report, save_sheet, found, test, train)


def neighbours(args: argparse.Namespace) -> None:
    """List and draw the nearest neighbours of one image."""
    dataset = options.chosen_images(args)
    query, place = options.chosen_query(args.image, dataset)
    if args.neighbours > (count := len(dataset) - (place is not None)):
        raise UserError(f"--neighbours {args.neighbours}: there are {count:,} images; use that or fewer")
    encoder = options.chosen_encoder(args, args.weights[0])
    how = options.extraction(args, encoder)
    features = features_of(encoder, dataset, how, "images")
    own = features_of(encoder, query, replace(how, cache=None), "query") if place is None else None
    if not args.world.main:
        return
    others = features.usable()
    others = others[others != (-1 if place is None else place)]
    bank, images = features.subset(others), dataset.subset(others.numpy())
    own = own or features.subset(torch.tensor([place]))
    found = retrieve(own, bank, rows=1, k=args.neighbours, device=args.world.device)
    result = found.plain(query, images)
    row = result["rows"][0]
    lines = [f"nearest neighbours of {row['query']} among {len(bank):,} images:"]
    lines += [f"  {value:.4f}  {name}" for value, name in zip(row["similarities"], row["neighbours"], strict=True)]
    report = _origin(encoder) | {"result": result}
    _finish(args, encoder, f"neighbours_{Path(args.image).stem}", lines, report, save_sheet, found, query, images)


def embed(args: argparse.Namespace) -> None:
    """Write features, names and labels to a file, and draw them in a plane."""
    if args.picture:
        embeddings.check_projection(args.picture)
    dataset = options.chosen_images(args)
    encoder = options.chosen_encoder(args, args.weights[0])
    features = features_of(encoder, dataset, options.extraction(args, encoder), "images")
    if not args.world.main:
        return
    found = embeddings.of_images(features, dataset, encoder.digest)
    path = args.output or _folder(args, encoder) / "features.npz"
    embeddings.save(path, found)
    print(f"{len(found.names):,} images, {found.features.shape[1]} features each: {path}", flush=True)
    if args.picture:
        shown = np.linspace(0, len(found.names) - 1, min(embeddings.MOST_POINTS, len(found.names))).round().astype(int)
        points = embeddings.project(found.features[shown], args.picture)
        title = f"{encoder.name}, {args.picture} of {len(shown):,} images"
        named = [found.classes[label] if label >= 0 else "" for label in found.labels[shown].tolist()]
        print(figures.drawn(path.with_suffix(".png"), figures.draw_points, title, points, named))


def consistency(args: argparse.Namespace) -> None:
    """Measure latent similarities and their targets for several checkpoints."""
    options.check_one_process(args)
    if args.crop or args.filter:
        raise UserError("--crop and --filter: consistency draws its views as training does; leave them out")
    dataset = evenly_spread(options.chosen_images(args), args.images)
    hints, device = options.encoder_hints(args), args.world.device
    subjects = options.distinct([consistency_probe.subject(weights, device, **hints) for weights in args.weights])
    encoder = options.chosen_encoder(args, args.weights[0])
    found = consistency_probe.measure(subjects, dataset, options.extraction(args, encoder), args.seed)
    _finish_several(args, encoder, "consistency", found, figures.draw_consistency)


def invariance(args: argparse.Namespace) -> None:
    """Measure which changes of an image several encoders keep in their features."""
    options.check_one_process(args)
    dataset = evenly_spread(options.chosen_images(args), args.images)
    encoders = options.chosen_encoders(args)
    found = [invariance_probe.invariance(one, dataset, options.extraction(args, one), args.seed) for one in encoders]
    _finish_several(args, encoders[0], "invariance", found, figures.draw_invariance)


def spectrum(args: argparse.Namespace) -> None:
    """Compute the singular values of the features of several encoders."""
    dataset = options.chosen_images(args)
    encoders, found = options.chosen_encoders(args), []
    for encoder in encoders:
        features = features_of(encoder, dataset, options.extraction(args, encoder), encoder.name)
        features = features.subset(features.usable())
        found.append(spectra.spectrum(encoder.name, features, normalise=not args.raw))
    if args.world.main:
        _finish_several(args, encoders[0], "spectrum", found, figures.draw_spectra)


def detect(args: argparse.Namespace) -> None:
    """Fine-tune a detector on an encoder, and measure its average precision."""
    encoder, name = options.chosen_encoder(args, args.weights[0]), f"detect_{args.detector}"
    found = detection(args, encoder, _folder(args, encoder) / name)
    if found is not None:
        report = _origin(encoder) | {"notes": found.notes, "result": found.plain()}
        _finish(args, encoder, name, found.lines(), report, draw_detections, found)


def transfer(args: argparse.Namespace) -> None:
    """Fill the table of linear probes on the paper's data sets."""
    names = options.chosen_datasets(args.datasets)
    encoders = options.chosen_encoders(args)
    folder, main = _folder(args, encoders[0]), args.world.main

    def probe(encoder: Encoder, splits: Splits) -> LinearResult:
        options.check_probe(splits)
        parts, metric = options.features_of_splits(args, encoder, splits), splits.protocol.metric
        return linear_probe(*parts, metric=metric, iterations=args.iterations, device=args.world.device)

    table = transfer_table(
        encoders,
        names,
        args.root,
        args.cache,
        probe,
        workers=args.workers,
        after_each=lambda table: table.save(folder) if main else None,
        say=print if main else lambda text: None,
    )
    if main:
        print(table.markdown())
        print(figures.drawn(folder / "transfer.png", figures.draw_table, table.accuracies(), "linear probes"))
        print(f"table: {folder / 'transfer.csv'}, {folder / 'transfer.md'}")


def _title(encoder: Encoder, splits: Splits) -> str:
    """Return the title of a picture."""
    return f"{encoder.name} on {splits.protocol.title}"


def _about(encoder: Encoder, splits: Splits, **features: Features) -> dict[str, Any]:
    """Begin a report: weights, data, and a summary of their features by split."""
    found = {split: summary(values) for split, values in features.items()}
    return _origin(encoder) | {"protocol": asdict(splits.protocol), "notes": splits.notes, "features": found}


def _origin(encoder: Encoder) -> dict[str, Any]:
    """Name the weights, and what normalises their images."""
    report = {"encoder": encoder.describe(), "weights_digest": encoder.digest}
    return report | {"mean": encoder.mean, "std": encoder.std}


def _folder(args: argparse.Namespace, encoder: Encoder) -> Path:
    """Return ``--output``, or ``eval/ENCODER/DATA``."""
    if args.output is not None:
        return Path(args.output)
    return Path("eval") / encoder.name.replace("/", "-").replace(":", "-") / options.data_name(args)


def _finish(
    args: argparse.Namespace, encoder: Encoder, name: str, lines: Sequence[str], report: dict[str, Any],
    draw: Callable[..., None] | None = None, *arguments: Any,
) -> None:  # fmt: skip
    """Save NAME.json, print ``lines``, and make ``draw(NAME.png, *arguments)``."""
    path = _folder(args, encoder) / f"{name}.json"
    write_text(path, json.dumps(report, indent=1, default=str) + "\n")
    for note in report.get("notes", ()):
        print(f"note: {note}")
    tested = report.get("features", {}).get("test")
    if tested:
        norm, spread = tested["mean_norm"], tested["spread"]
        print(f"features: {tested['dimensions']} dimensions, mean norm {norm:.3g}, spread {spread:.3g}")
    picture = [] if draw is None else [figures.drawn(path.with_suffix(".png"), draw, *arguments)]
    print("\n".join([*lines, *picture, f"numbers: {path}"]), flush=True)


def _finish_several(
    args: argparse.Namespace, encoder: Encoder, name: str, found: Sequence[Any], draw: Callable[..., None]
) -> None:
    """Finish as :func:`_finish` does, with one result of each encoder."""
    report = {"result": [asdict(one) for one in found]}
    _finish(args, encoder, name, [line for one in found for line in one.lines()], report, draw, found)
