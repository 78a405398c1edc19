"""Studies: which variants of a method are compared, as flags of ``cocor-train``.

``plain`` is the method without CoCor, ``cocor`` CoCor as configured, and the others change one thing of it.
"""

from dataclasses import dataclass, field
from typing import Any

Flags = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """Variant of a method; ``like``: train in as much time as that variant."""

    key: str
    title: str
    flags: Flags = field(default_factory=dict)
    like: str | None = None


PLAIN = Variant("plain", "plain", {"consistency": "none"})
COCOR = Variant("cocor", "+ CoCor")
CONSTANTS = Variant("constants", "+ CoCor, constants", {"mmnn": "constants"})
PULL: Flags = {"mmnn": "none"}
PLAIN_AS_LONG = Variant("plain-as-long", "plain, as long as + CoCor", PLAIN.flags, like="cocor")
CENTRE: Flags = {
    "consistency_beta": 8.0, "consistency_weight": 10.0,
    "mmnn_shape": "concave", "mmnn_optimiser": "sgd", "mmnn_lr": 0.5,
}  # fmt: skip


def _each(flag: str, *values: str) -> list[Variant]:
    """Make a variant for every value of one flag."""
    return [
        Variant(f"{flag}-{it}".replace(",", "-"), f"+ CoCor, {flag.replace('_', ' ')} {it}", {flag: it})
        for it in values
    ]


def _loss(beta: int, weight: int) -> Variant:
    flags = {"consistency_beta": float(beta), "consistency_weight": float(weight)}
    return Variant(f"beta-{beta}-weight-{weight}", f"+ CoCor, beta {beta}, weight {weight}", flags)


def _tune(words: str, **flags: Any) -> Variant:
    """Change one setting of the centre."""
    return Variant(f"tune-{words.lower()}".replace(" ", "-"), f"centre, {words}", CENTRE | flags)


# Paper: tables "linear evaluation", "Linear evaluation of CoCor models trained with and without MMNN" (core); "Training
# Time Comparison" (clock); "Different amounts of labeled data"; figure on single lengths and table "one length l";
# table "LooC, AugSelf" (pool); table "fixed DA orderings". The others ask what the paper leaves open.
STUDIES: dict[str, list[Variant]] = {
    "core": [PLAIN, COCOR, CONSTANTS],
    "cocor": [PLAIN, COCOR],
    "clock": [PLAIN, COCOR, PLAIN_AS_LONG],
    "decisive": [  # do learned targets do anything that a pull towards more views does not?
        PLAIN,
        COCOR,
        CONSTANTS,
        Variant("no-target", "+ pull, no target", PULL),
        Variant("near-1", "+ CoCor, constants 0.99 0.985 0.98", CONSTANTS.flags | {"constants": "0.99,0.985,0.98"}),
        Variant("shuffled", "+ CoCor, shuffled labels", {"shuffle_labels": True}),
        Variant("clean-view", "+ pull to the clean view", PULL | {"pool": "identity"}),
        Variant("multiview", "composites as positives", {"consistency": "none", "auxiliary": "multiview"}),
        Variant("strong-view", "a composite as second view", {"consistency": "none", "auxiliary": "strongview"}),
        Variant("heavy", "+ CoCor, weight 30", {"consistency_weight": 30.0}),
        Variant("heavy-no-target", "+ pull, no target, weight 30", PULL | {"consistency_weight": 30.0}),
        Variant("heaviest", "+ CoCor, weight 100", {"consistency_weight": 100.0}),
        Variant("heaviest-no-target", "+ pull, no target, weight 100", PULL | {"consistency_weight": 100.0}),
        PLAIN_AS_LONG,
    ],
    "cheap": [  # ahead of the plain method at equal time?
        PLAIN,
        COCOR,
        PLAIN_AS_LONG,
        Variant("one-length", "+ CoCor, one length a step", {"lengths_per_step": 1}),
        Variant("one-pull", "+ pull, one length a step", PULL | {"lengths_per_step": 1}),
        Variant(
            "one-small-pull",
            "+ pull, one length of 24 pixels a step",
            PULL | {"lengths_per_step": 1, "composite_size": 24},
        ),
    ],
    "mmnn": [COCOR, CONSTANTS],
    "hypergradient": _each("hypergradient", "exact", "taylor", "released"),
    "lengths": [PLAIN, *_each("lengths", "1", "2", "3", "4", "5", "10", "1,2,3")],
    "pool": _each("pool", "all", "color", "affine"),
    "labels": [PLAIN, *_each("label_fraction", "1.0", "0.1", "0.01", "0.001")],
    "recipe": _each("recipe", "paper", "released"),
    "order": [PLAIN, *_each("composite_order", "random", "fixed1", "fixed2")],
    "loss": [
        PLAIN,
        Variant("printed", "+ CoCor, the loss as printed", {"consistency_beta": 1.0, "consistency_weight": 1.0}),
        *(_loss(*pair) for pair in ((1, 10), (8, 1), (8, 3), (8, 10))),
        *_each("consistency", "abs"),
        *_each("constants", "0.95,0.9,0.85", "0.6,0.5,0.4"),
    ],
    "tune": [  # what the paper leaves open, one setting at a time
        PLAIN,
        Variant("centre", "+ CoCor, beta 8, weight 10", CENTRE),
        *(_tune(f"beta {beta:g}", consistency_beta=beta) for beta in (1.0, 4.0, 16.0)),
        *(_tune(f"weight {weight:g}", consistency_weight=weight) for weight in (1.0, 3.0, 30.0)),
        _tune("magnitudes released", magnitudes="released"),
        _tune("recipe released", recipe="released"),
        _tune("constants", mmnn="constants"),
        *(_tune(f"MMNN lr {rate:g}", mmnn_lr=rate) for rate in (0.05, 5.0)),
        _tune("MMNN wait 0", mmnn_wait_epochs=0),
    ],
}
