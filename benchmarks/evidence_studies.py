"""The studies that :mod:`evidence` runs: which variants of a method are compared.

A variant is a set of flags of ``cocor-train``; a study runs all its variants for every method and seed. ``plain`` is
the method without CoCor, ``cocor`` CoCor as the configuration has it, and the others change one thing of it.
"""

import re
from dataclasses import dataclass, field
from typing import Any

Flags = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """``flags`` change the configuration. ``like`` names a variant that this one trains as long as, in time instead of
    epochs: its number of epochs then follows from both speeds."""

    key: str
    title: str
    flags: Flags = field(default_factory=dict)
    like: str | None = None


PLAIN = Variant("plain", "plain", {"consistency": "none"})
COCOR = Variant("cocor", "+ CoCor")
CONSTANTS = Variant("constants", "+ CoCor, constants", {"mmnn": "constants"})


def _each(flag: str, values: dict[str, Any]) -> list[Variant]:
    """A variant for every value of one flag, titled by the keys."""
    name = flag.replace("_", " ")
    return [Variant(_key(f"{flag}-{word}"), f"+ CoCor, {name} {word}", {flag: value}) for word, value in values.items()]


def _key(text: str) -> str:
    """``text`` as the name of a folder."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def _loss(beta: float, weight: float) -> Variant:
    flags = {"consistency_beta": beta, "consistency_weight": weight}
    return Variant(f"beta-{beta:g}-weight-{weight:g}", f"+ CoCor, beta {beta:g}, weight {weight:g}", flags)


def _tune() -> list[Variant]:
    """What the paper leaves open, varied one at a time around a centre: sharpness and weight of the loss, magnitudes,
    the recipe for composites, where the targets come from and how fast they are learned."""
    centre: Flags = {"consistency_beta": 8.0, "consistency_weight": 10.0, "mmnn_lr": 0.5}
    changes: list[tuple[str, Flags]] = [
        *((f"beta {beta:g}", {"consistency_beta": beta}) for beta in (1.0, 4.0, 16.0)),
        *((f"weight {weight:g}", {"consistency_weight": weight}) for weight in (1.0, 3.0, 30.0)),
        ("magnitudes released", {"magnitudes": "released"}),
        ("recipe released", {"recipe": "released"}),
        ("constants", {"mmnn": "constants"}),
        *((f"MMNN lr {rate:g}", {"mmnn_lr": rate}) for rate in (0.05, 5.0)),
        ("MMNN wait 0", {"mmnn_wait_epochs": 0}),
    ]
    return [
        Variant("centre", "+ CoCor, beta 8, weight 10", centre),
        *(Variant(_key(f"tune-{words.lower()}"), f"centre, {words}", centre | flags) for words, flags in changes),
    ]


# Paper: tables "linear evaluation", "Linear evaluation of CoCor models trained with and without MMNN" (core); "Training
# Time Comparison" (clock); "Different amounts of labeled data"; figure on single lengths and table "one length l";
# table "LooC, AugSelf" (pool); table "fixed DA orderings". The others ask what the paper leaves open.
STUDIES: dict[str, list[Variant]] = {
    "core": [PLAIN, COCOR, CONSTANTS],
    "cocor": [PLAIN, COCOR],
    "clock": [PLAIN, COCOR, Variant("plain-as-long", "plain, as long as + CoCor", PLAIN.flags, like="cocor")],
    "mmnn": [COCOR, CONSTANTS],
    "hypergradient": _each("hypergradient", {"exact": "exact", "taylor": "taylor", "released": "released"}),
    "lengths": [PLAIN, *_each("lengths", {word: word for word in ("1", "2", "3", "5", "10", "1,2,3")})],
    "pool": _each("pool", {"all": "all", "color": "color", "affine": "affine"}),
    "labels": [PLAIN, *_each("label_fraction", {"100 %": 1.0, "10 %": 0.1, "1 %": 0.01, "0.1 %": 0.001})],
    "recipe": _each("recipe", {"paper": "paper", "released": "released"}),
    "order": [PLAIN, *_each("composite_order", {word: word for word in ("random", "fixed1", "fixed2")})],
    "loss": [
        PLAIN,
        Variant("printed", "+ CoCor, the loss as printed", {"consistency_beta": 1.0, "consistency_weight": 1.0}),
        *(_loss(beta, weight) for beta, weight in ((1.0, 10.0), (8.0, 1.0), (8.0, 3.0), (8.0, 10.0))),
        *_each("consistency", {"abs": "abs"}),
        *_each("constants", {"0.95,0.90,0.85": "0.95,0.9,0.85", "0.60,0.50,0.40": "0.6,0.5,0.4"}),
    ],
    "tune": [PLAIN, *_tune()],
}
