"""Files from strangers: whatever they hold, no code of theirs runs, nothing is written outside the output, no memory is
filled, nothing hangs, and the mistake is one line with exit code 2. Data sets are in test_hostile_data.py.
"""

import ast
import os
import pickle
import random
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.hostile import Harm, Refused, damaged, one_line_or_none, refusal, run_train

import loaders.jit
from cocor.backbone import build_backbone
from cocor.eval.export.command import main as export
from cocor.train import main as train
from cocor.weights.load import load_encoder
from loaders.datasets.dataset import open_folder
from loaders.datasets.size_index import index_file


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What harmful files would make. It must not be there at the end."""
    path = tmp_path / "harm"
    yield path
    assert not path.exists()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return partial(refusal, capsys)


class TestWeights:
    @pytest.mark.parametrize("form", ["torch", "old torch", "pickle"])
    def test_a_checkpoint_runs_no_code(
        self, form: str, marker: Path, tmp_path: Path, photo_folder: Path, refused: Refused
    ) -> None:
        weights = {f"backbone.{k}": v for k, v in build_backbone("test_resnet").state_dict().items()}
        state = {"step": 1, "epoch": 0, "training": {"method": weights}, "config": Harm(marker)}
        path = tmp_path / "x.pt"
        if form == "pickle":
            path.write_bytes(pickle.dumps(Harm(marker)))
        else:
            torch.save(state, path, _use_new_zipfile_serialization=form != "old torch")
        options = {"data": photo_folder, "loader": "torch", "output": tmp_path / "run"}
        assert "x.pt" in refused(run_train(**options, resume=path))
        assert "x.pt" in refused(run_train(**options, init=path))
        line = refused(lambda: export([str(path), "--output", str(tmp_path / "exported")]))
        assert "x.pt: " in line and "run code" in line
        assert not (tmp_path / "run").exists() and not (tmp_path / "exported").exists()

    @pytest.mark.parametrize("header", [
        b"\xff" * 8 + b"{}", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 7) + b"\xff\xfe{}   ", b"[" * 100_000, b"",
        *(b'{"conv1.weight":{"dtype":"F32","shape":[%b],"data_offsets":[%b]}}' % rest for rest in (
            (b"4", b"0,1099511627776"), (b"-4", b"0,16"), (b"4294967296,4294967296,4", b"0,16"), (b"4", b"16,0"))),
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}',
        b'{"__metadata__":{"architecture":{"a":1}},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"OBJ","shape":[4],"data_offsets":[0,16]}}',
    ])  # fmt: skip
    def test_headers_of_safetensors_that_lie(
        self, header: bytes, tmp_path: Path, photo_folder: Path, refused: Refused
    ) -> None:
        path = tmp_path / "x.safetensors"
        length = struct.pack("<Q", len(header)) if header[:1] in (b"{", b"[") else b""
        path.write_bytes(length + header + bytes(32))
        assert "x.safetensors: " in refused(lambda: export([str(path), "--output", str(tmp_path)]))
        options = {"data": photo_folder, "loader": "torch", "output": tmp_path / "run"}
        assert "x.safetensors: " in refused(run_train(**options, init=path))

    def test_damaged_exports_are_refused_or_harmless(self, tmp_path: Path) -> None:
        weights = {name: value.contiguous() for name, value in build_backbone("test_resnet").state_dict().items()}
        content = safetensors.torch.save(weights, {"architecture": "test_resnet", "stem": "imagenet"})
        rng, path = random.Random(0), tmp_path / "x.safetensors"
        for _ in range(60):
            path.write_bytes(damaged(content, rng, (0, 8 + int.from_bytes(content[:8], "little"))))
            one_line_or_none(lambda: load_encoder(path))


class TestYaml:
    @pytest.mark.parametrize("text", [
        "lr: !!python/object/apply:os.mkdir ['MARKER']", "lr: !!python/object/new:os.mkdir ['MARKER']",
        "!!python/object/apply:os.mkdir ['MARKER']", "lr: !!python/name:os.mkdir",
        "method: !!python/object/apply:subprocess.check_call [[mkdir, 'MARKER']]",
        "? !!python/object/apply:os.mkdir ['MARKER']\n: 1", "defaults: !!python/object/apply:os.mkdir ['MARKER']",
    ])  # fmt: skip
    def test_tags_are_refused(self, text: str, marker: Path, tmp_path: Path, refused: Refused) -> None:
        path = tmp_path / "x.yaml"
        path.write_text(text.replace("MARKER", str(marker)))
        line = refused(lambda: train(["--config", str(path)]))
        assert "x.yaml" in line

    @pytest.mark.parametrize("key", ["lr", "method", "overwrite", "lengths", "data", "defaults", "seed", "gpus"])
    def test_a_billion_laughs_are_not_written_out(self, key: str, tmp_path: Path, refused: Refused) -> None:
        lines = ["x0: &a0 [ha, ha]"] + [f"x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
        path = tmp_path / "x.yaml"
        path.write_text("\n".join([f"{key}:", *(f"  - {line}" for line in lines)]))
        assert "x.yaml: " in refused(lambda: train(["--config", str(path)]))
        path.write_text(f"{key}: " + "[" * 20_000)  # depth is no crash
        assert "x.yaml is not YAML" in refused(lambda: train(["--config", str(path)]))


class TestLists:
    def test_a_foreign_size_index_runs_no_code(self, corner_folder: Path, tmp_path: Path, marker: Path) -> None:
        root = tmp_path / "images"
        shutil.copytree(corner_folder, root, ignore=shutil.ignore_patterns(".*"))
        true = open_folder(root, quiet=True)
        with np.load(index_file(root)) as stored:
            good = dict(stored)
        harmful = np.array([Harm(marker)] * 6, object)
        for change in (
            {"sizes": harmful},
            {"key": np.array(Harm(marker), object)},
            {"faults": harmful, "fault_at": np.arange(6)},
        ):
            np.savez(index_file(root), **{**good, **change})
            found = open_folder(root, quiet=True)
            assert np.array_equal(found.sizes, true.sizes) and found.plain.dtype == np.bool_


class TestCompiledCode:
    @pytest.fixture
    def shared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder for compiled code in a temporary folder that all share, as for a read-only installation."""
        monkeypatch.setattr(loaders.jit, "__file__", "/proc/nowhere/jit.py")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
        return tmp_path / f"cocor-{os.getuid()}"

    @pytest.mark.parametrize("trap", ["link", "open to all", "another's"])
    def test_a_planted_folder_is_not_used(self, shared: Path, tmp_path: Path, trap: str) -> None:
        if trap == "another's" and os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        (tmp_path / "theirs").mkdir()
        if trap == "link":
            shared.symlink_to(tmp_path / "theirs")
        else:
            shared.mkdir()
            shared.chmod(0o777) if trap == "open to all" else os.chown(shared, 12345, 12345)
        assert loaders.jit._cache_folder.__wrapped__() == ""

    def test_its_sources_are_what_python_imports(self) -> None:
        package = Path(loaders.jit.__file__).parent

        def imported(path: Path) -> set[Path]:
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
            froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
            assert not any(node.level for node in froms), f"{path}: a relative import is not seen by loaders.jit"
            modules = [f"{node.module}.{name.name}" for node in froms for name in node.names]
            modules += [node.module or "" for node in froms]
            modules += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
            files = (package.parent.joinpath(*name.split(".")).with_suffix(".py") for name in modules)
            return {file for file in files if file.is_file() and file.is_relative_to(package)}

        expected, wanted = set(), [path for path in package.rglob("*.py") if "@jit" in path.read_text()]
        while wanted:
            path = wanted.pop()
            if path not in expected:
                expected.add(path)
                wanted += imported(path)
        assert loaders.jit.sources() == sorted(expected)
        hidden = re.compile(
            r"^\s*(from loaders[\w.]* import (\(|.*\\\\$)|from \.|.*import_module\(.loaders)", re.MULTILINE
        )
        for path in package.rglob("*.py"):  # it sees absolute imports of one line only
            assert not hidden.search(path.read_text()), path
        assert {"views", "kernels"} <= {path.parent.name for path in expected} and len(expected) > 12
