"""Lower programs: (op code, magnitude) -> eight int32 parameters for any executor.

All transcendental arithmetic (the cosine of a rotation, the bell of a blur) happens here, once, on the host; what is
left for the executors is integer and single-precision arithmetic, which gives the same bits on every machine.
Affine maps are Pillow's own 16.16 fixed-point coefficients, so its NEAREST warps are reproduced pixel by pixel.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loaders.jit import jit
from loaders.views.ops import Op

PARAMETERS = 8
BLUR_TAPS = 12  # the centre and 11 neighbours a side: torchvision's GaussianBlur(kernel_size=23), as in SimCLR and MoCo
BLUR_UNIT = 1 << 15

# numba freezes plain integers into the compiled code; enum members would be boxed
BRIGHTNESS, COLOR, CONTRAST, SHARPNESS = int(Op.BRIGHTNESS), int(Op.COLOR), int(Op.CONTRAST), int(Op.SHARPNESS)
POSTERIZE, SOLARIZE, HUE, GAUSSIAN_BLUR = int(Op.POSTERIZE), int(Op.SOLARIZE), int(Op.HUE), int(Op.GAUSSIAN_BLUR)
ROTATE, SHEAR_X, SHEAR_Y = int(Op.ROTATE), int(Op.SHEAR_X), int(Op.SHEAR_Y)
TRANSLATE_X, TRANSLATE_Y = int(Op.TRANSLATE_X), int(Op.TRANSLATE_Y)


def lower(codes: NDArray[np.uint8], magnitudes: NDArray[np.float32], size: int) -> NDArray[np.int32]:
    """Compute the integer parameters of every op of every program.

    ``codes`` uint8 and ``magnitudes`` float32 have the same shape, any (..., P); views are ``size`` x ``size`` pixels.
    Returns int32 (..., P, 8), zero where an op takes no parameter:

    - Brightness, Color, Contrast, Sharpness: [0] the bits of the float32 factor.
    - Posterize: [0] AND mask. Solarize: [0] threshold, values at or above it are inverted.
    - Rotate, ShearX/Y, TranslateX/Y: [0:6] = a0..a5 in 16.16 fixed point; output (x, y) takes the input pixel at
      ``(a2 + a0*x + a1*y) >> 16, (a5 + a3*x + a4*y) >> 16``, black where that is outside.
    - Hue: [0] added to Pillow's uint8 H, modulo 256.
    - GaussianBlur: [0:6] = weights w0..w11 as uint16, two a word, low half first, with w0 + 2*(w1 + .. + w11) = 2**15;
      [6] = radius, the largest k with w_k > 0.
    """
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    magnitudes = np.ascontiguousarray(magnitudes, dtype=np.float32)
    if codes.shape != magnitudes.shape:
        raise ValueError(f"codes {codes.shape} and magnitudes {magnitudes.shape} must have one shape")
    params = np.zeros((*codes.shape, PARAMETERS), dtype=np.int32)
    _lower_all(codes.reshape(-1), magnitudes.reshape(-1), size, params.reshape(-1, PARAMETERS))
    return params


def normalisation_table(mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Compute (v / 255 - mean) / std of every uint8 value: (3, 256) float32.

    Computed in single precision in this order, and so equal to torchvision's ToTensor and Normalize to the bit.
    """
    values = np.arange(256, dtype=np.float32) / np.float32(255)
    return (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]


@jit
def _lower_all(codes: NDArray[np.uint8], magnitudes: NDArray[np.float32], size: int, params: NDArray[np.int32]) -> None:
    bits = magnitudes.view(np.int32)
    for i in range(codes.size):
        code, magnitude = codes[i], np.float64(magnitudes[i])
        if code in (BRIGHTNESS, COLOR, CONTRAST, SHARPNESS):
            params[i, 0] = bits[i]
        elif code == POSTERIZE:
            kept = min(max(int(magnitude), 0), 8)
            params[i, 0] = 256 - (1 << (8 - kept))
        elif code == SOLARIZE:
            params[i, 0] = math.ceil(magnitude)
        elif code == HUE:
            params[i, 0] = int(magnitude * 255) & 255
        elif code == GAUSSIAN_BLUR:
            _blur_weights(magnitude, params[i])
        elif code == ROTATE:
            _rotation(magnitude, size, params[i])
        elif code == SHEAR_X:
            _affine(1.0, magnitude, 0.0, 0.0, 1.0, 0.0, params[i])
        elif code == SHEAR_Y:
            _affine(1.0, 0.0, 0.0, magnitude, 1.0, 0.0, params[i])
        elif code == TRANSLATE_X:
            _affine(1.0, 0.0, float(int(magnitude * size)), 0.0, 1.0, 0.0, params[i])
        elif code == TRANSLATE_Y:
            _affine(1.0, 0.0, 0.0, 0.0, 1.0, float(int(magnitude * size)), params[i])


@jit
def _affine(a: float, b: float, c: float, d: float, e: float, f: float, out: NDArray[np.int32]) -> None:
    """Convert to the fixed point of Pillow's AFFINE; c and f move to pixel centres."""
    out[0], out[1], out[2] = _fixed(a), _fixed(b), _fixed(c + a * 0.5 + b * 0.5)
    out[3], out[4], out[5] = _fixed(d), _fixed(e), _fixed(f + d * 0.5 + e * 0.5)


@jit
def _fixed(value: float) -> int:
    return math.floor(value * 65536.0 + 0.5)


@jit
def _rotation(degrees: float, size: int, out: NDArray[np.int32]) -> None:
    """Follow Pillow's ``rotate``: about the centre; quarter turns come out exact."""
    angle = -(degrees % 360.0) * (math.pi / 180.0)
    cos, sin = _round15(math.cos(angle)), _round15(math.sin(angle))
    centre = size / 2.0
    c = cos * -centre + sin * -centre + centre
    f = -sin * -centre + cos * -centre + centre
    _affine(cos, sin, c, -sin, cos, f, out)


@jit
def _round15(value: float) -> float:
    return np.rint(value * 1e15) / 1e15


@jit
def _blur_weights(sigma: float, out: NDArray[np.int32]) -> None:
    """Compute a Gaussian of 23 taps in 15 bits; the centre takes what rounding leaves."""
    bell = np.zeros(BLUR_TAPS)
    bell[0] = 1.0
    total = 1.0
    for k in range(1, BLUR_TAPS):
        bell[k] = math.exp(-0.5 * (k / sigma) ** 2) if sigma > 0 else 0.0
        total += 2.0 * bell[k]
    centre = BLUR_UNIT
    for k in range(BLUR_TAPS - 1, 0, -1):
        weight = int(bell[k] / total * BLUR_UNIT + 0.5)
        centre -= 2 * weight
        out[k // 2] |= weight << (16 * (k % 2))
        if out[6] == 0 and weight > 0:
            out[6] = k
    out[0] |= centre
