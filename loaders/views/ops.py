"""Basic augmentations: names, codes, pools and magnitude ranges.

A view is made by a *program*, a short list of (op code, magnitude). The first 14 codes are the paper's basic
augmentations (appendix "Candidate Augmentations in CoCor") in alphabetical order; a composition vector counts them in
this order. The codes behind them complete the usual contrastive augmentations. ``END`` pads a program.

Magnitudes are physical values: an enhancement factor, degrees, a share of the image's side, a threshold, a sigma.
"""

from enum import IntEnum
from typing import Literal

Magnitudes = Literal["uniform", "released"]
Order = Literal["random", "fixed1", "fixed2"]

END = 255


class Op(IntEnum):
    """Operation codes; the 14 basic ones first, in the order of composition vectors."""

    AUTO_CONTRAST = 0
    BRIGHTNESS = 1
    COLOR = 2
    CONTRAST = 3
    EQUALIZE = 4
    IDENTITY = 5
    POSTERIZE = 6
    ROTATE = 7
    SHARPNESS = 8
    SHEAR_X = 9
    SHEAR_Y = 10
    SOLARIZE = 11
    TRANSLATE_X = 12
    TRANSLATE_Y = 13
    HUE = 14
    GRAYSCALE = 15
    GAUSSIAN_BLUR = 16

    @property
    def label(self) -> str:
        """Name an operation as the paper and pictures do, such as ``ShearX``."""
        return "".join(part.capitalize() for part in self.name.split("_"))


BASIC: tuple[Op, ...] = tuple(op for op in Op if op <= Op.TRANSLATE_Y)
AFFINE: frozenset[Op] = frozenset({Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y})

# The choices of --pool; a program may add its own, of basic augmentations. With "identity" a composite is the original
# itself, the control of what a clean view does.
POOLS: dict[str, tuple[Op, ...]] = {
    "all": BASIC,
    "color": tuple(op for op in BASIC if op not in AFFINE),
    "affine": tuple(op for op in BASIC if op in AFFINE or op == Op.IDENTITY),
    "identity": (Op.IDENTITY,),
}

# The paper's ablation on the order of a composite's operations: as drawn, or always the same. Of its two fixed orders
# it states only that the first has Rotate before Brightness: here geometry comes first, and last in the second.
ORDERS: dict[Order, tuple[Op, ...]] = {
    "random": (),
    "fixed1": (*(op for op in BASIC if op in AFFINE), *(op for op in BASIC if op not in AFFINE)),
    "fixed2": (*(op for op in BASIC if op not in AFFINE), *(op for op in BASIC if op in AFFINE)),
}

# (low, high, integer, random sign) of each op. FixMatch's ranges, on which the authors' code builds; ops that take no
# magnitude are absent. Integers include both ends.
UNIFORM: dict[Op, tuple[float, float, bool, bool]] = {
    **dict.fromkeys((Op.BRIGHTNESS, Op.COLOR, Op.CONTRAST, Op.SHARPNESS), (0.05, 0.95, False, False)),
    **dict.fromkeys((Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y), (0.0, 0.3, False, True)),
    Op.ROTATE: (0.0, 30.0, False, True),
    Op.POSTERIZE: (4, 8, True, False),
    Op.SOLARIZE: (0, 256, True, False),
}

# The authors' fixed level 10: the weakest setting of the colour ops, the strongest of the geometric ones; Posterize
# keeps all 8 bits and Solarize inverts the whole image.
RELEASED: dict[Op, tuple[float, float, bool, bool]] = {
    op: (low, low, integer, sign) if op == Op.SOLARIZE else (high, high, integer, sign)
    for op, (low, high, integer, sign) in UNIFORM.items()
}

RANGES: dict[Magnitudes, dict[Op, tuple[float, float, bool, bool]]] = {"uniform": UNIFORM, "released": RELEASED}
