"""The choice of the few labelled images: stratified, seeded and nested.

The images of each class are put into a random order that depends on the seed and the image's place alone; a split takes
the first ones. So a smaller fraction's images are among a larger one's, and every class has at least one.
"""

import numpy as np
import numpy.typing as npt

from loaders.views.philox import sort_keys

_SPLIT_STREAM = 0xFFFFFFFE  # apart from every crop, view and order


def stratified_split(labels: npt.NDArray[np.int64], fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """Places in ``labels`` (N,) that make up ``fraction`` of every class: int64 (M,), ascending; -1 is no class.

    Of a class of n images these are ``round(fraction * n)`` (half rounded up), at least one.
    """
    order = np.lexsort((sort_keys(seed, 0, len(labels), _SPLIT_STREAM), labels))
    classes, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    wanted = np.maximum(1, np.floor(fraction * counts + 0.5).astype(np.int64))
    known = classes >= 0
    taken = [order[start : start + count] for start, count in zip(first[known], wanted[known], strict=True)]
    return np.sort(np.concatenate(taken)).astype(np.int64) if taken else np.empty(0, np.int64)
