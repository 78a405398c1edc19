"""The bodies of ``cocor-eval``'s sub-commands: weights and data -> features -> probe -> terminal, JSON and picture."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from cocor.distributed import collectives
from cocor.distributed.env import RankEnv
from cocor.eval import checks, figures, reports
from cocor.eval import options as inputs
from cocor.eval.datasets.protocols import KNN_K, RECIPES, WAY_SHOTS
from cocor.eval.datasets.splits import Splits
from cocor.eval.features import Features, features_of, joined, summary
from cocor.eval.peer import against_sklearn, check_peer
from cocor.eval.probes import consistency as consistency_probe
from cocor.eval.probes import fewshot as few
from cocor.eval.probes import spectrum as spectra
from cocor.eval.probes.knn import knn_curve
from cocor.eval.probes.linear import LinearResult, linear_probe
from cocor.eval.probes.retrieval import evenly_spread, retrieve, save_sheet
from cocor.eval.probes.sgd import sgd_probe, sgd_probe_on_crops, shared_batch, shortened
from cocor.eval.transfer import transfer as transfer_table
from cocor.eval.weights.load import Encoder
from cocor.log import set_up_logging
from loaders.errors import UserError
from loaders.prep.demo import or_demo
from loaders.text import available_cores


def in_its_place(options: argparse.Namespace, run: Callable[[argparse.Namespace], None]) -> None:
    """Run a command ``run`` on its device, as one rank if torchrun started several. UserError if ``--gpu yes`` finds no
    GPU, or if the GPU or the machine runs out of memory."""
    if options.gpu == "yes" and not torch.cuda.is_available():
        raise UserError("--gpu yes: PyTorch finds no GPU; leave the flag out to use the CPU")
    options.world = collectives.init(use_gpu=options.gpu != "no" and torch.cuda.is_available())
    set_up_logging(options.world)
    env = RankEnv.read()
    if options.workers is None and env.launcher is not None:  # the ranks of a machine share its cores
        options.workers = max(1, available_cores() // env.local_size)
    inputs.check_writable(options)
    if getattr(options, "data", None) is not None:
        options.data = or_demo(options.data)
    try:
        run(options)
    except (MemoryError, RuntimeError) as error:
        raise _out_of_memory(error, options) or error from None
    collectives.shutdown()


def _out_of_memory(error: Exception, options: argparse.Namespace) -> UserError | None:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return UserError(f"the GPU's memory is full: lower --batch-size ({options.batch_size}), or use --gpu no")
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "not enough memory" in text:
        return UserError(f"too little memory: lower --batch-size ({options.batch_size}), --image-size or --workers")
    return None


def linear(options: argparse.Namespace) -> None:
    """The linear probe: full-batch L-BFGS (:mod:`cocor.eval.probes.linear`) or SGD (:mod:`cocor.eval.probes.sgd`)."""
    unused = ("epochs", "learn_from") if options.probe == "lbfgs" else ("metric", "iterations", "against_sklearn")
    for name in unused:
        if getattr(options, name):
            raise UserError(f"--{name.replace('_', '-')}: not for --probe {options.probe}; leave it out")
    splits = inputs.chosen_splits(options)
    checks.check_probe(splits, validates=options.probe == "lbfgs")
    encoder = inputs.chosen_encoder(options, options.weights[0])
    if options.against_sklearn:
        check_peer(len(splits.train.classes))
    if options.probe != "lbfgs":
        return _linear_by_sgd(options, encoder, splits)
    train, val, test = inputs.features_of_splits(options, encoder, splits)
    if not options.world.main:
        return None
    device, report = options.world.device, reports.about(encoder, splits, train=train, test=test)
    metric = options.metric or splits.protocol.metric
    found = linear_probe(train, val, test, metric=metric, iterations=options.iterations or 1000, device=device)
    report["result"] = found.plain()
    picture = figures.drawn(
        reports.folder(options, encoder) / "linear.png",
        figures.draw_grid,
        reports.title(encoder, splits),
        found.trials,
        found.penalty,
    )
    path = reports.finish(options, encoder, "linear", [*found.lines(), picture], report)
    if options.against_sklearn:  # may take minutes, so only after the result is saved and printed
        peer = against_sklearn(joined(train.flat(), val), found.penalty, device)
        reports.save(path, report | {"against_sklearn": peer})
        print(
            f"the same fit from zero: {peer['seconds']:.2f} s here, {peer['seconds_sklearn']:.2f} s scikit-learn; "
            f"objective {peer['objective']:.6f} here, {peer['objective_sklearn']:.6f} there"
        )
    return None


def _linear_by_sgd(options: argparse.Namespace, encoder: Encoder, splits: Splits) -> None:
    settings, how = shortened(RECIPES[options.probe], options.epochs), inputs.extraction(options, encoder)
    if options.learn_from == "features":
        train, val, test = inputs.features_of_splits(options, encoder, splits)
        if not options.world.main:
            return
        found = sgd_probe(joined(train.flat(), val), test, settings, device=options.world.device)
    else:
        if options.crop == "ten":
            raise UserError("--crop ten: learn from these crops with --learn-from features")
        shared_batch(int((splits.learned_from().labels >= 0).sum()), how)
        test = features_of(encoder, splits.test, how, "test images")
        found = sgd_probe_on_crops(encoder, splits.learned_from(), test, settings, how)
    if options.world.main:
        report = reports.about(encoder, splits, test=test) | {"settings": asdict(settings), "result": asdict(found)}
        reports.finish(options, encoder, f"linear_{options.probe}", found.lines(), report)


def knn(options: argparse.Namespace) -> None:
    """k-NN accuracy for several k (:mod:`cocor.eval.probes.knn`): test images in a bank of the others, or
    leave-one-out."""
    if options.leave_one_out:
        dataset = inputs.images_to_look_at(options)
        checks.check_leave_one_out(options, dataset)
        encoder = inputs.chosen_encoder(options, options.weights[0])
        bank = queries = features_of(encoder, dataset, inputs.extraction(options, encoder), "images").labelled()
        title = f"{encoder.name} on {dataset.root.name}"
        alone = int((bank.labels.bincount() == 1).sum())
        note = f"{alone:,} images are the only one of their class, so none of them can be right"
        notes: tuple[str, ...] = (note,) if alone else ()
    else:
        splits = inputs.chosen_splits(options)
        checks.check_knn(options, splits)
        encoder = inputs.chosen_encoder(options, options.weights[0])
        train, val, queries = inputs.features_of_splits(options, encoder, splits)
        bank, queries = joined(train.flat(), val).labelled(), queries.labelled()
        title, notes = reports.title(encoder, splits), splits.notes
    most = len(bank) - options.leave_one_out
    chosen = options.k or sorted({min(k, most) for k in KNN_K})
    bank, queries = _to_device(bank, options), _to_device(queries, options)
    pairs = (queries.values, queries.labels, bank.values, bank.labels)
    how = {"temperature": options.temperature, "leave_one_out": options.leave_one_out}
    found = dict(zip(chosen, knn_curve(*pairs, chosen, **how), strict=True))
    if not options.world.main:
        return
    lines = [f"k = {k}: top-1 {result.accuracy:.2%}" for k, result in found.items()]
    lines.append(f"{len(queries):,} queries, bank of {len(bank):,}, temperature {options.temperature}")
    lines += [f"note: {note}" for note in notes]
    curve = {encoder.name: {k: result.accuracy for k, result in found.items()}}
    picture = reports.folder(options, encoder) / "knn.png"
    lines.append(figures.drawn(picture, figures.draw_curve, title, "neighbours k", curve))
    report = {"encoder": encoder.describe(), "features": summary(bank), "temperature": options.temperature}
    reports.finish(options, encoder, "knn", lines, report | {"result": [asdict(result) for result in found.values()]})


def fewshot(options: argparse.Namespace) -> None:
    """n-shot probes and N-way tasks (:mod:`cocor.eval.probes.fewshot`)."""
    splits = inputs.chosen_splits(options)
    checks.check_fewshot(options, splits)
    encoder = inputs.chosen_encoder(options, options.weights[0])
    train, val, test = inputs.features_of_splits(options, encoder, splits, "ten" if options.crop == "ten" else None)
    if not options.world.main:
        return
    pool, device = joined(train, val), options.world.device
    metric = options.metric or splits.protocol.metric
    shots = [few.shots(pool, test, n, seeds=range(options.seeds), metric=metric, device=device) for n in options.shots]
    lines = [line for result in shots for line in result.lines()]
    tasks = []
    if options.tasks:
        for count in WAY_SHOTS:
            tasks.append(few.episodes(test, count, ways=options.ways, tasks=options.tasks, device=device))
    lines += [line for task in tasks for line in task.lines()]
    picture = reports.folder(options, encoder) / "fewshot.png"
    lines.append(figures.drawn(picture, figures.draw_shots, reports.title(encoder, splits), shots))
    report = reports.about(encoder, splits, train=train, test=test)
    report |= {"shots": [asdict(result) for result in shots], "tasks": [asdict(task) for task in tasks]}
    reports.finish(options, encoder, "fewshot", lines, report)


def retrieval(options: argparse.Namespace) -> None:
    """A contact sheet of nearest training images for a few test images (:mod:`cocor.eval.probes.retrieval`)."""
    inputs.refuse_ten_crops(options)
    splits = inputs.chosen_splits(options)
    checks.check_retrieval(options, splits)
    encoder = inputs.chosen_encoder(options, options.weights[0])
    how = inputs.extraction(options, encoder)
    bank = features_of(encoder, splits.train, how, "bank")
    queries = features_of(encoder, splits.test, how, "queries")
    if not options.world.main:
        return
    rows = min(options.queries, len(queries))
    found = retrieve(
        queries, bank, rows=rows, k=options.neighbours, seed=options.seed, device=options.world.device
    )  # fmt: skip
    sheet = reports.folder(options, encoder) / "retrieval.png"
    save_sheet(found, splits.test, splits.train, sheet)
    report = reports.about(encoder, splits, train=bank, test=queries)
    report |= {"result": found.plain(splits.test, splits.train)}
    reports.finish(options, encoder, "retrieval", [*found.lines(), f"picture: {sheet}"], report)


def consistency(options: argparse.Namespace) -> None:
    """Latent similarities and their targets for several checkpoints (:mod:`cocor.eval.probes.consistency`)."""
    if options.world.size > 1:
        raise UserError("consistency runs in one process; start it without torchrun")
    if options.crop or options.filter:
        raise UserError("--crop and --filter: consistency draws its views as training does; leave them out")
    dataset = evenly_spread(inputs.images_to_look_at(options), options.images)
    hints = {"which": options.which, "architecture": options.backbone, "stem": options.stem}
    subjects = [consistency_probe.subject(path, options.world.device, **hints) for path in options.weights]
    names = inputs.distinct([one.name for one in subjects])
    subjects = [replace(one, name=name) for one, name in zip(subjects, names, strict=True)]
    encoder = inputs.chosen_encoder(options, options.weights[0])
    found = consistency_probe.measure(subjects, dataset, inputs.extraction(options, encoder), options.seed)
    lines = [line for one in found for line in one.lines()]
    lines.append(figures.drawn(reports.folder(options, encoder) / "consistency.png", figures.draw_consistency, found))
    reports.finish(options, encoder, "consistency", lines, {"result": [asdict(one) for one in found]})


def spectrum(options: argparse.Namespace) -> None:
    """Singular values of the features of several encoders (:mod:`cocor.eval.probes.spectrum`)."""
    dataset = inputs.images_to_look_at(options)
    encoders = inputs.chosen_encoders(options)
    found = []
    for encoder in encoders:
        features = features_of(encoder, dataset, inputs.extraction(options, encoder), encoder.name)
        found.append(spectra.spectrum(encoder.name, features, normalise=not options.raw))
    if not options.world.main:
        return
    lines = [line for one in found for line in one.lines()]
    lines.append(figures.drawn(reports.folder(options, encoders[0]) / "spectrum.png", figures.draw_spectra, found))
    reports.finish(options, encoders[0], "spectrum", lines, {"result": [one.plain() for one in found]})


def transfer(options: argparse.Namespace) -> None:
    """The table of linear probes on the paper's data sets (:mod:`cocor.eval.transfer`)."""
    names = inputs.chosen_datasets(options.datasets)
    encoders = inputs.chosen_encoders(options)
    folder = reports.folder(options, encoders[0])
    main = options.world.main

    def probe(encoder: Encoder, splits: Splits) -> LinearResult:
        checks.check_probe(splits)
        train, val, test = inputs.features_of_splits(options, encoder, splits)
        metric, iterations = splits.protocol.metric, options.iterations
        return linear_probe(train, val, test, metric=metric, iterations=iterations, device=options.world.device)

    table = transfer_table(
        encoders,
        names,
        options.root,
        options.cache,
        probe,
        workers=options.workers,
        after_each=lambda table: table.save(folder) if main else None,
        say=print if main else lambda text: None,
    )
    if main:
        print(table.markdown())
        print(figures.drawn(folder / "transfer.png", figures.draw_table, table.accuracies(), "linear probes"))
        print(f"table: {folder / 'transfer.csv'}, {folder / 'transfer.md'}")


def _to_device(features: Features, options: argparse.Namespace) -> Features:
    device = options.world.device
    return Features(features.values.to(device), features.labels.to(device))
