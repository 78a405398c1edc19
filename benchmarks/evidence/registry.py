"""Registry of the paper's tables and figures: flags, measures and printed numbers.

Labels are those of the paper's source; its numbers are percentages, of one run each. ``benchmarks/paper.py`` makes
commands of these, projects their cost and fills the tables.
"""

from dataclasses import dataclass

from benchmarks.evidence.report import NAMES


@dataclass(frozen=True)
class Column:
    """Measure of a row: a command of cocor-eval, or "" for the training's own.

    The command is without weights and folders; ``key`` says which of several numbers of it is meant, or of the
    training, ``knn`` (last accuracy) or ``hours``.
    """

    title: str
    command: str
    key: str = ""


@dataclass(frozen=True)
class Row:
    """A training: ``METHOD_SCALE.yaml`` and ``flags`` of cocor-train, and its numbers.

    ``paper`` has a number for each column, or is empty where the paper only draws; ``measured`` is the variant in the
    results of a study, if there is one; ``missing`` says why the row cannot be run.
    """

    title: str
    method: str
    flags: str = ""
    paper: tuple[float, ...] = ()
    measured: str = ""
    missing: str = ""


@dataclass(frozen=True)
class Table:
    """A table or figure: ``flags`` hold for all rows at the paper's own scales.

    ``scales`` are the paper's, the first by default; ``pictures`` are commands of cocor-eval without a number.
    """

    title: str
    labels: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    columns: tuple[Column, ...] = ()
    scales: tuple[str, ...] = ("in100",)
    flags: str = ""
    pictures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reduced: bool = True  # whether it makes sense on small images as well


@dataclass(frozen=True)
class Scale:
    """Data of a size: configurations, images, and a GPU's forward passes a second.

    ``columns``, ``results`` (a file of a study) and ``note`` are those of data that the paper does not have.
    """

    data: str
    file: str
    images: int
    gpu: str
    passes_per_s: float
    flags: str = ""
    columns: tuple[Column, ...] = ()
    results: str = ""
    note: str = ""


def linear(title: str, data: str) -> Column:
    return Column(title, f"linear --dataset {data}")


# The projections are those of configs/moco_in1k.yaml: 1,150 images/s at 14 passes an image. On small images two runs at
# a time made 12,000 images/s with CoCor, which is 14 passes here too, and 40,000 without, 4 passes.
_H100, _H200 = 1_150 * 14, 12_000 * 14
_REDUCED = "The recipes' loss (preset tuned), unless a row says otherwise, and the paper's MMNN, learned by SGD."
_SMALL = (Column("linear", "linear"), Column("k-NN", "", "knn"))
SCALES = {
    "in100": Scale("ImageNet-100", "{method}_in100", 126_689, "H100", _H100),
    "in1k": Scale("ImageNet-1K", "{method}_in1k", 1_281_167, "H100", _H100),
    "cifar": Scale("CIFAR-10", "cifar10_{method}", 50_000, "H200", _H200, "--epochs 72 --knn-every 12",
                   _SMALL, "cifar10-h200.json", f"{_REDUCED} What is expected was measured on JPEGs of quality 75."),
    "tiny100": Scale("100 classes of Tiny ImageNet, at 32 pixels", "tiny100_{method}", 50_000, "H200", _H200,
                     "--epochs 20 --knn-every 5 --image-size 32 --blur-prob 0", _SMALL, "tiny100-h200.json", _REDUCED),
}  # fmt: skip
# Of learned targets at the reduced scales: the network and the update rule that are in the paper, and in the results.
MEASURED_MMNN = "--mmnn-optimiser sgd --mmnn-shape concave"
PRINTED_MMNN = f"{MEASURED_MMNN} --mmnn-layers 3"
WORK = {"resnet34": 0.89}  # of a pass, relative to ResNet-50

_PLAIN = "--consistency none"
_BATCHNORM = (
    "MoCo's queries have BatchNorm over a rank's whole batch, its keys over groups of 32; the paper's setting is not "
    "stated, MoCo's authors have 64 for both."
)
_MMNN = (
    'The MMNN is 14-64-1 with a linear path and learns by Adam; the paper has "a 3-layer MLP" and prints SGD '
    f"({PRINTED_MMNN}), whose targets hardly move at these rates."
)
_UNSTATED = "Not stated in the paper: temperatures (MoCo 0.2, SupCon 0.07), crops (0.2 to 1), strengths of composites."
_REPRINTED = "The paper takes the numbers of LooC, AugSelf and MoCo from their authors."

_IN100, _IN1K = linear("IN-100", "imagenet100"), linear("IN-1K", "imagenet1k")
_CUB, _FLOWERS = linear("CUB200", "cub200"), linear("Flowers102", "flowers102")
_TRANSFER = (
    linear("Cifar10", "cifar10"), linear("Cifar100", "cifar100"), _CUB, linear("Caltech101", "caltech101"),
    linear("SUN397", "sun397"), linear("Food101", "food101"), _FLOWERS, linear("Pets", "pets"),
)  # fmt: skip
_SHOTS = "fewshot --dataset flowers102 --crop ten --tasks 0"
_VOC, _COCO = "detect --dataset voc0712", "detect --dataset coco"
_DETECTION = (
    *(Column(f"VOC {key}", _VOC, key) for key in ("AP", "AP50", "AP75")),
    *(Column(f"COCO {key}", _COCO, key) for key in ("AP", "AP50", "AP75", "APs", "APm", "APl")),
)


def _pair(method: str, plain: tuple[float, ...] = (), ours: tuple[float, ...] = ()) -> tuple[Row, Row]:
    """Make the rows of a method alone and with CoCor."""
    name = NAMES[method]
    return Row(name, method, _PLAIN, plain, "plain"), Row(f"{name} + CoCor", method, "", ours, "cocor")


def _each(method: str, flag: str, numbers: dict[str, float | None]) -> tuple[Row, ...]:
    """Make a row of CoCor for every value of one flag."""
    name = f"{NAMES[method]} + CoCor, {flag.removeprefix('--').replace('-', ' ')}"
    return tuple(
        Row(f"{name} {value}", method, f"{flag} {value}", () if number is None else (number,))
        for value, number in numbers.items()
    )


def _rival(title: str, method: str, auxiliary: str, paper: tuple[float, ...], flags: str = "") -> Row:
    return Row(title, method, f"{_PLAIN} --auxiliary {auxiliary} {flags}".strip(), paper)


def _looc(kept: str, paper: tuple[float, ...]) -> Row:
    """Make a row of LooC, which here tells crops and colours apart, not rotations."""
    if "rotation" in kept:
        return Row(f"LooC ({kept})", "moco", paper=paper, missing="--auxiliary looc keeps no rotations")
    return _rival(f"LooC ({kept})", "moco", "looc", paper, f"--looc-kept {kept}")


def _constants(method: str, best: tuple[float, ...]) -> tuple[Row, ...]:
    """Make the sweep of the one constant of one length, around the paper's best."""
    return tuple(
        Row(f"{NAMES[method]} + CoCor, length {length}, constant {at + step:g}", method,
            f"--mmnn constants --lengths {length} --constants {_falling_to(at + step, length)}")
        for length, at in enumerate(best, 1) for step in (-0.2, -0.1, 0.0, 0.1)
    )  # fmt: skip


def _falling_to(constant: float, length: int) -> str:
    """Name constants of all lengths up to ``length``, of which only the last is used."""
    return ",".join(f"{round(1 - (1 - constant) * at / length, 4):g}" for at in range(1, length + 1))


def _times(title: str, method: str, flags: str, hours: float, accuracies: tuple[float, ...]) -> tuple[Row, ...]:
    """Make rows of 50, 100 and 200 epochs, the last of which are the recipe's; ``hours`` are the paper's for 50."""
    lengths = {50: f"{flags} --epochs 50", 100: f"{flags} --epochs 100", 200: flags}
    return tuple(
        Row(f"{title}, {epochs} epochs", method, words.strip(), (hours * epochs / 50, accuracy))
        for (epochs, words), accuracy in zip(lengths.items(), accuracies, strict=True)
    )


_LENGTHS = ("1", "2", "3", "4", "5", "10", "1,2,3")

TABLES = {
    "linear-in100": Table(
        "table 1: linear evaluation, pre-trained on ImageNet-100", ("tab:linear_eval",),
        (*_pair("moco", (67.04, 82.15, 59.17, 21.52, 79.23, 39.43, 52.97, 71.77, 56.94),
                (71.66, 83.87, 59.64, 22.57, 81.51, 41.95, 54.81, 75.65, 60.23)),
         *_pair("simsiam", (73.92, 84.66, 61.82, 26.13, 85.11, 45.96, 58.73, 82.40, 65.60),
                (83.70, 86.89, 66.36, 34.50, 87.85, 49.92, 62.48, 87.95, 76.04)),
         *_pair("supcon", (80.16, 84.30, 61.33, 26.46, 85.04, 41.95, 52.45, 76.99, 73.75),
                (82.14, 85.49, 62.18, 27.40, 87.12, 42.87, 53.93, 79.04, 75.95))),
        (_IN100, *_TRANSFER), notes=(_BATCHNORM, _MMNN, _UNSTATED),
    ),
    "linear-in1k": Table(
        "table 2: linear evaluation, pre-trained on ImageNet-1K", ("tab:linear_eval_in1k",),
        (*_pair("moco", (67.56, 92.24, 74.33, 41.54, 92.00, 58.28, 69.84, 88.86, 81.74),
                (72.83, 93.28, 76.19, 44.11, 93.10, 60.15, 71.10, 90.39, 83.08)),
         *_pair("simsiam", (70.93, 93.08, 76.24, 51.05, 93.13, 60.81, 71.18, 92.11, 85.01),
                (73.25, 94.04, 78.12, 54.50, 94.51, 63.09, 73.31, 92.84, 87.24)),
         *_pair("supcon", (74.18, 93.17, 76.55, 52.30, 93.28, 61.03, 71.54, 91.34, 85.35),
                (76.24, 94.61, 77.91, 55.73, 94.66, 63.80, 74.09, 92.17, 87.21))),
        (_IN1K, *_TRANSFER), ("in1k",), notes=(_BATCHNORM, _MMNN, _UNSTATED),
    ),
    "detection": Table(
        "table 3: object detection", ("tab:obj_det",),
        (*_pair("moco", (50.23, 76.52, 54.42, 34.23, 55.08, 36.60, 16.67, 37.27, 50.97),
                (51.11, 77.41, 54.88, 39.13, 58.30, 42.19, 23.19, 43.45, 52.13)),
         *_pair("simsiam", (52.04, 77.86, 57.11, 34.15, 55.21, 36.50, 15.30, 37.37, 50.49),
                (54.31, 80.60, 59.58, 34.80, 56.29, 37.05, 17.53, 39.88, 51.74)),
         *_pair("supcon", (47.41, 75.83, 53.17, 34.26, 55.11, 36.35, 14.34, 37.40, 50.56),
                (49.03, 77.22, 54.19, 35.67, 56.10, 37.98, 16.63, 38.71, 51.29))),
        _DETECTION, ("in1k", "in100"), reduced=False,
        notes=("The paper does not say on which ImageNet encoders were pre-trained.", "Hours are of pre-training.",
               _BATCHNORM),
    ),
    "aug-aware": Table(
        "table 4: augmentation-aware methods, ResNet-34", ("tab:aug_aware_comparison",),
        (Row("SimSiam", "simsiam", _PLAIN, (63.90, 29.10, 76.10, 19.60), "plain"),
         _rival("AugSelf", "simsiam", "augself", (75.96, 29.96, 82.96, 29.41)),
         _rival("Hierarchical", "simsiam", "hierarchical", (67.10, 33.90, 83.60, 20.70)),
         _rival("EquiMod", "simsiam", "equimod", (65.45, 30.09, 77.91, 19.06)),
         Row("SimSiam + CoCor", "simsiam", "", (77.76, 34.07, 83.88, 29.93), "cocor")),
        (_IN100, _CUB, _FLOWERS, linear("StanfordCars", "cars")), flags="--backbone resnet34",
        notes=("Rivals are of this project, on SimSiam; cocor/auxiliary/ states where they differ.", _MMNN),
    ),
    "strong": Table(
        "table 5: methods of strong augmentations", ("tab:strong_aug_comparison",),
        (_rival("CLSA", "moco", "clsa", (69.4, 40.20, 89.97, 61.24)),
         _rival("RenyiCL", "moco", "renyicl", (72.6, 45.05, 90.17, 61.80)),
         Row("MoCo v2 + CoCor", "moco", "", (72.8, 44.11, 90.39, 63.18), "cocor")),
        (_IN1K, _CUB, _FLOWERS, linear("Aircraft", "aircraft")), ("in1k",), notes=(_BATCHNORM, _MMNN),
    ),
    "pools": Table(
        "table 6: pools of basic augmentations, LooC and AugSelf", ("tab:ablation_basic_da",),
        (Row("MoCo v2", "moco", _PLAIN, (81.0, 36.7, 67.9, 77.3), "plain"),
         _looc("color", (81.1, 40.1, 68.2, 77.6)), _looc("rotation", (80.2, 38.8, 70.1, 79.3)),
         _looc("color,rotation", (79.2, 39.6, 70.9, 80.8)),
         _rival("MoCo v2 + AugSelf", "moco", "augself", (82.4, 37.0, 81.7, 84.5)),
         _rival("SimSiam + AugSelf", "simsiam", "augself", (82.6, 45.3, 86.4, 88.3)),
         Row("SimSiam + CoCor (color)", "simsiam", "--pool color", (83.5, 46.5, 89.1, 90.2)),
         Row("SimSiam + CoCor (affine)", "simsiam", "--pool affine", (81.8, 45.2, 83.5, 86.1)),
         Row("SimSiam + CoCor (both)", "simsiam", "--pool all", (83.7, 47.9, 88.9, 89.6))),
        (_IN100, _CUB, Column("Flowers, 5 shots", _SHOTS, "5"), Column("Flowers, 10 shots", _SHOTS, "10")),
        flags="--epochs 500", notes=(_REPRINTED, _BATCHNORM, _MMNN),
    ),
    "mmnn": Table(
        "table 7: with and without MMNN", ("tab:ablation_mmnn",),
        tuple(row for method, numbers in (("moco", (67.04, 69.51, 71.66)), ("simsiam", (73.92, 82.18, 83.70)))
              for plain, ours in (_pair(method, numbers[:1], numbers[2:]),)
              for row in (plain, Row(f"{NAMES[method]} + CoCor, constants", method, "--mmnn constants", numbers[1:2],
                                     "constants"), ours,
                          Row(f"{NAMES[method]} + CoCor, MMNN as printed", method, PRINTED_MMNN))),
        (_IN100,), notes=(_BATCHNORM, _MMNN),
    ),
    "labels": Table(
        "table 8: share of the labels", ("tab:ablation_label_amount",),
        (*_each("simsiam", "--label-fraction", {"1": 75.97, "0.1": 75.82, "0.01": 75.79, "0.001": 75.46}),
         Row("SimSiam", "simsiam", _PLAIN, (59.20,), "plain")),
        (_IN100,), flags="--epochs 100", notes=("The paper's text has 100 epochs, its caption 50.", _MMNN),
    ),
    "lengths": Table(
        "figure 5 and table 10: single lengths of composites", ("fig:ablation_aug_len", "tab:stronger_augs"),
        (*_each("moco", "--lengths", dict(zip(_LENGTHS, (47.90, 47.70, 48.08, None, 45.16, 43.07, None), strict=True))),
         Row("MoCo v2", "moco", _PLAIN, (42.66,), "plain"),
         *_each("simsiam", "--lengths",
                dict(zip(_LENGTHS, (54.01, 54.20, 55.16, None, 53.50, 52.70, None), strict=True))),
         Row("SimSiam", "simsiam", _PLAIN, (44.60,), "plain")),
        (_IN100,), flags="--epochs 50",
        notes=("Length 4 and lengths 1,2,3 are in the figure, which has no numbers.", _BATCHNORM, _MMNN),
    ),
    "constants": Table(
        "figure 7 and table 9: the best constant of each length", ("fig:const_select", "tab:constant_l_d"),
        (*_constants("moco", (0.80, 0.75, 0.65)), *_constants("simsiam", (0.75, 0.70, 0.60))),
        (_IN100,), flags="--epochs 50",
        notes=("The figure has no numbers; best were 0.80, 0.75, 0.65 (MoCo) and 0.75, 0.70, 0.60 (SimSiam) at lengths "
               "1, 2, 3.", _BATCHNORM),
    ),
    "baselines": Table(
        "table 11: BYOL and INTL", ("tab:more_baseline",),
        (*_pair("byol", (68.05, 60.13, 20.27, 78.90, 39.03, 53.01), (72.30, 62.42, 22.75, 80.51, 42.64, 55.32)),
         *_pair("intl", (74.58, 62.73, 29.05, 87.45, 47.06, 60.38), (76.98, 63.06, 31.40, 88.81, 48.27, 64.27))),
        (_IN100, *_TRANSFER[1:6]),
        notes=("The paper states neither epochs (here 200) nor settings; here they are the authors'. Its SGD for BYOL: "
               "-- --optimiser sgd --decay-biases --lr 0.05 --weight-decay 1e-4.", _MMNN),
    ),
    "time": Table(
        "table 12: training time", ("tab:training_time",),
        (*_times("MoCo v2", "moco", _PLAIN, 13.4, (64.78, 66.81, 67.22)),
         *_times("SimSiam", "simsiam", _PLAIN, 13.2, (66.89, 68.12, 70.93)),
         *_times("CLSA", "moco", f"{_PLAIN} --auxiliary clsa", 18.1, (67.95, 69.15, 71.19)),
         *_times("MoCo v2 + CoCor", "moco", "", 18.5, (69.26, 70.76, 72.83)),
         *_times("SimSiam + CoCor", "simsiam", "", 18.1, (70.90, 72.03, 73.25))),
        (Column("hours", "", "hours"), _IN1K), ("in1k",), reduced=False,
        notes=("The paper's hours are those of 4 A100, ours of the GPUs that the training was given.",
               "The paper's table 2 has 67.56 for MoCo after 200 epochs.",
               "At equal time on small images: python -m benchmarks.evidence --study clock.", _BATCHNORM, _MMNN),
    ),
    "order": Table(
        "table 13: order of the composites", ("tab:da_ordering",),
        (*_pair("moco", (67.04,), (71.66,)), *_each("moco", "--composite-order", {"fixed1": 71.32, "fixed2": 71.47})),
        (_IN100,), notes=("The paper does not name its two orders; the random order's number is that of table 1.",
                          _BATCHNORM, _MMNN),
    ),
    "loss": Table(
        "appendix A: softplus and absolute value", ("eq:consist_loss", "eq:consist_loss_alt"),
        tuple(Row(f"{NAMES[method]} + CoCor, {title}", method, f"--preset paper {flags}".strip())
              for method in ("moco", "simsiam")
              for title, flags in (("softplus", ""), ("absolute value", "--consistency abs"),
                                   ("softplus of the printed sign", "--consistency-sign printed"))),
        (_IN100,), notes=("The paper says that softplus was better, without numbers.", _BATCHNORM, _MMNN),
    ),
    "post-hoc": Table(
        "figure 4: similarities by length, singular values", ("fig:post_hoc",),
        (*_pair("moco"), *_pair("simsiam")),
        pictures=("consistency --dataset imagenet100", "spectrum --dataset imagenet100"),
    ),
    "retrieval": Table(
        "figure 1: nearest neighbours", ("fig:overview",),
        (*_pair("moco"), *_pair("simsiam")), (), ("in1k", "in100"),
        pictures=("retrieval --dataset cub200", "retrieval --dataset flowers102"),
        notes=("The paper does not say on which ImageNet encoders were pre-trained.",),
    ),
}  # fmt: skip
DRAWINGS = ("fig:pipeline", "fig:aug_strength", "fig:img_var")  # figures 2, 3, 6: nothing to run
