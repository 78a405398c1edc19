"""FFCV's own reader and loader take the files that cocor-prep writes, and show what is in them."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from helpers.prep_cases import CORNERS, corner_colours, corner_image, good_cases, jpeg_bytes, write_all
from PIL import Image

from loaders.datasets import beton
from loaders.datasets.beton import open_beton
from loaders.prep.convert import convert
from loaders.prep.encode import Settings
from loaders.prep.sources import open_source

pytest.importorskip("ffcv", reason="needs the ffcv extra", exc_type=ImportError)
pytestmark = pytest.mark.ffcv


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every readable oddity and some more JPEG kinds, in two classes."""
    root = tmp_path_factory.mktemp("ffcv")
    write_all(root / "source" / "odd", good_cases())
    kinds = {f"{name[-1]}.jpg": jpeg_bytes(corner_image(), subsampling=name) for name in ("4:2:0", "4:2:2")}
    write_all(root / "source" / "kinds", kinds | {"grey.jpg": jpeg_bytes(corner_image().convert("L"))})
    convert(open_source(root / "source"), root / "x.beton", "beton", Settings(), workers=1)
    return root / "x.beton"


def test_the_layout_is_ffcvs(prepared: Path) -> None:
    from ffcv.reader import Reader
    from ffcv.types import ALLOC_TABLE_TYPE, CURRENT_VERSION, FieldDescType, HeaderType

    assert beton.VERSION == CURRENT_VERSION and beton.ALLOCATION == ALLOC_TABLE_TYPE
    for ours, theirs in ((beton.HEADER, HeaderType), (beton.FIELD, FieldDescType)):
        assert ours.itemsize == theirs.itemsize and dict(ours.fields or {}) == dict(theirs.fields)
    theirs, ours = Reader(str(prepared)), open_beton(prepared)
    assert theirs.field_names == list(beton.FIELD_NAMES) and theirs.num_samples == len(ours)
    assert theirs.page_size == ours.page_size
    for name in ("mode", "width", "height", "data_ptr"):
        assert np.array_equal(theirs.metadata["f0"][name], ours.table[name])
    assert np.array_equal(theirs.metadata["f1"], ours.labels)
    assert np.array_equal(theirs.alloc_table["size"], ours.sizes_in_bytes)


@pytest.mark.parametrize("os_cache", [True, False])
def test_ffcvs_loader_shows_every_image_upright(os_cache: bool, prepared: Path) -> None:
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor

    file = open_beton(prepared)
    decoders = {"image": [CenterCropRGBImageDecoder((64, 64), 1), ToTensor()], "label": [IntDecoder(), ToTensor()]}
    how = {"order": OrderOption.SEQUENTIAL, "os_cache": os_cache, "pipelines": decoders}
    loader = Loader(str(prepared), batch_size=len(file), num_workers=1, **how)
    images, labels = (tensor.numpy().copy() for tensor in next(iter(loader)))
    assert labels.ravel().tolist() == file.labels.tolist()
    colours = np.array(list(CORNERS.values()), np.float64)
    for index, name in enumerate(file.names):
        wanted = colours if "grey" not in name else corner_colours(Image.open(BytesIO(file.read(index))))
        assert np.abs(corner_colours(Image.fromarray(images[index])) - wanted).max() < 16, name
