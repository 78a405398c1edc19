"""benchmarks/throughput.py and its parts: that it runs anywhere, and that its figures are what it says they are."""

import hashlib
import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_clock import wound_by_hand
from PIL import Image
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cpu_time  # noqa: E402
import probe  # noqa: E402
import references  # noqa: E402
import scaling  # noqa: E402
import step  # noqa: E402
import throughput  # noqa: E402
import timing  # noqa: E402
from cells import Absent, Measured, Settings, measure  # noqa: E402
from cocor.distributed import launch  # noqa: E402
from images import open_images, store  # noqa: E402
from loaders.cpus import available_cores  # noqa: E402
from loaders.datasets.stored import open_stored  # noqa: E402
from loaders.errors import UserError  # noqa: E402
from loaders.synthetic import SyntheticLoader  # noqa: E402
from photographs import IMAGENET, make_photographs  # noqa: E402
from processes import alone, in_processes  # noqa: E402
from sources import STAGES_OF, Contender, Request, open_source  # noqa: E402
from stages import Stage  # noqa: E402
from throughput import arguments, settings_of  # noqa: E402
from throughput_report import cell_line  # noqa: E402
from timing import Window, milliseconds, time_together, time_windows  # noqa: E402

LOADERS: tuple[Contender, ...] = ("dali", "torch", "torchvision")
STAGES: tuple[Stage, ...] = ("decode", "composites", "step")


def run(*words: object, benchmark: str = "throughput.py") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / benchmark), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


@pytest.fixture(scope="module")
def result(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The JSON file of a very small run; it also draws the picture."""
    folder = tmp_path_factory.mktemp("throughput")
    choice = [word for name in LOADERS for word in ("--loader", name)]
    choice += [word for name in STAGES for word in ("--stage", name)]
    small = ("--quick", "--gpus", 0, "--seconds", 0.1, "--batch-size", 4, "--images", 16, "--data", photo_folder)
    done = run(*small, *choice, "--json", folder / "out.json", "--plot", folder / "out.png")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout and "dali / torchvision" in done.stdout
    assert Image.open(folder / "out.png").width > 500
    return json.loads((folder / "out.json").read_text())


def test_the_result_says_on_what_machine_and_data_it_was_taken(result: dict) -> None:
    assert result["machine"]["cores"] >= 1 and result["machine"]["torch"] == torch.__version__.partition("+")[0]
    assert result["data"]["images"] == 16 and result["data"]["mean_kilobytes"] > 1
    assert result["settings"]["batch_size"] == 4 and not result["settings"]["on_gpu"]


def test_every_cell_has_figures(result: dict) -> None:
    cells = {(cell["loader"], cell["stage"]): cell for cell in result["cells"]}
    assert list(cells) == [(loader, stage) for loader in LOADERS for stage in STAGES if stage in STAGES_OF[loader]]
    assert [cell["reason"] for cell in cells.values() if "reason" in cell] == []


def test_figures_are_plausible_and_agree_with_each_other(result: dict) -> None:
    for cell in result["cells"]:
        if "reason" in cell:
            continue
        assert 0 < cell["cores_busy"] < 4 * result["machine"]["cores"]
        assert cell["samples_per_s_per_core"] == pytest.approx(cell["samples_per_s"] / cell["cores_busy"])
        views = 0 if cell["stage"] == "decode" else 6
        assert cell["views_per_s"] == pytest.approx(views * cell["samples_per_s"])
        assert 0 <= cell["batch_ms_p50"] <= cell["batch_ms_p99"]
        assert cell["batches"] >= 3 * cell["windows"] >= 3
        assert (cell["gpu_share"] is not None) == (cell["stage"] == "step")
        assert cell["gpu_share"] is None or cell["gpu_share"] < 1
    ratios = {ratio["name"]: ratio["samples_per_s"] for ratio in result["ratios"]}
    rates = {
        c["loader"]: c["samples_per_s"] for c in result["cells"] if c["stage"] == "composites" and "reason" not in c
    }
    assert ratios["dali / torchvision"] == pytest.approx(rates["dali"] / rates["torchvision"])


def test_figures_are_written_to_every_place_that_is_asked_for(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(throughput, "measure", lambda loader, stage, *_: Absent(loader, stage, "not measured"))
    words = ["--quick", "--gpus", "0", "--loader", "synthetic", "--data", str(photo_folder)]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *words, "--save", "--json", str(tmp_path / "own.json")])
    throughput.main()
    (saved,) = (tmp_path / "results").iterdir()
    assert json.loads(saved.read_text()) == json.loads((tmp_path / "own.json").read_text())
    assert [cell["reason"] for cell in json.loads(saved.read_text())["cells"]] == ["not measured"] * 4


Refusal = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a benchmark here that must end with exit code 2 before it prints a thing; its one line."""

    def refused(benchmark: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [benchmark, *map(str, words)])
        main = importlib.import_module(benchmark.removesuffix(".py")).main
        assert (main() if benchmark == "probe.py" else launch.command(benchmark, main)) == 2
        printed = capsys.readouterr()
        (line,) = printed.err.splitlines()
        assert line.startswith(f"{benchmark}: error: ") and not printed.out
        return line.removeprefix(f"{benchmark}: error: ")

    return refused


def test_a_mistake_is_one_line(tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "stored.beton").touch()
    for data, told in (("no/such/folder", "no such folder"), (tmp_path / "stored.beton", "give their folder")):
        line = refused("throughput.py", "--quick", "--data", data)
        assert f"{data}: " in line and told in line


@pytest.mark.parametrize(
    ("words", "machine", "expected"),
    [
        ("", {"gpus": 0, "cores": 2}, {"on_gpu": False, "ranks": 1, "batch_size": 64, "workers": 2}),
        ("", {"gpus": 4, "cores": 64}, {"on_gpu": True, "ranks": 1, "batch_size": 256, "workers": 64}),
        ("--gpus 4", {"gpus": 4, "cores": 64}, {"ranks": 4, "batch_size": 1024, "workers": 16}),
        ("--gpus 0", {"gpus": 4, "cores": 64}, {"on_gpu": False, "backbone": "resnet18"}),
        ("--gpus 2", {"gpus": 1, "cores": 2}, "--gpus 2: there are 1 here"),
        ("--gpus 2 --batch-size 7", {"gpus": 2, "cores": 2}, "--batch-size 7: take a multiple of 2"),
    ],
)
def test_settings_follow_the_machine(words: str, machine: dict, expected: dict | str) -> None:
    options = arguments(words.split())
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            settings_of(options, machine)
    else:
        settings = vars(settings_of(options, machine))
        assert {key: settings[key] for key in expected} == expected


def test_two_ranks_share_the_batch_and_their_rates_add_up(photo_folder: Path) -> None:
    images = open_images(photo_folder, 16)
    settings = Settings(False, 2, 8, 16, 1, 0.2, 0.65, "test_resnet")
    together = measure("synthetic", "step", images, settings)
    assert isinstance(together, Measured), together
    assert together.samples_per_s > 0 and together.gpu_share is not None


def test_the_probes_benchmark_compares_with_scikit_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "probe.json"
    assert probe.main(["--images", "300", "--dimensions", "8", "--classes", "3", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["converged"] == 45 and abs(found["one_fit"]["relative_difference"]) < 1e-4
    assert probe.main(["--images", "300", "--dimensions", "8", "--classes", "1"]) == 2
    assert capsys.readouterr().err == (
        "probe.py: error: all training images are of 1 class; a probe needs two or more class folders\n"
    )


def test_a_single_window_has_no_spread() -> None:
    settings = Settings(True, 1, 64, 224, 16, 6.0, 0.65, "resnet50")
    single: dict[tuple[str, int], float] = {}
    for windows, spread in ((1, None), (3, 0.1)):
        cell = Measured("torch", "step", 500.0, 0.1 * (windows > 1), 3000.0, 50.0, 10.0, 1.0, 2.0, 16, windows)
        assert scaling._describe(cell, settings, single)["spread"] == spread
        assert cell_line(cell).split()[5] == ("-" if spread is None else "10%")


def test_the_scaling_benchmark_says_that_it_needs_a_gpu(refused: Refusal) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert refused("scaling.py").startswith("there is no GPU here")


def test_the_step_benchmark_refuses_graphs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert step.main(["--executions", "graph", "--size", "32", "--methods", "moco"]) == 2
    assert (
        capsys.readouterr().err == "step.py: error: --execution graph: CUDA graphs need a GPU; use --execution eager\n"
    )


@pytest.mark.parametrize("words", [("--batch-sizes", "0"), ("--steps", "0"), ("--size", "-1"), ("--lengths", "0")])
def test_the_step_benchmark_refuses_sizes_that_are_none(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    assert step.main(words) == 2
    assert f"step.py: error: {words[0]}" in capsys.readouterr().err.splitlines()[-1]
    assert step.main(["--batch-sizes", "1", "--size", "32", "--methods", "moco"]) == 2  # no BatchNorm of one image
    assert "step.py: error: batch_size: 1" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--batch-size 0", "--images 0", "--images -3", "--seconds 0", "--seconds nan",
                                   "--budget 0", "--workers 0", "--size 0", "--gpus -1",
                                   "--hw-decoder-load 2"])  # fmt: skip
def test_nothing_does_not_mean_the_default(words: str) -> None:
    flag, value = words.split()
    with pytest.raises(UserError, match=f"^{flag}: {value} must be "):
        arguments(words.split())


@pytest.mark.parametrize(
    ("benchmark", "words"),
    [
        ("executor.py", "--samples 0"), ("executor.py", "--repeats 0"), ("executor.py", "--seed -1"),
        ("kernel.py", "--batches 64,0"), ("kernel.py", "--repeats 0"), ("kernel.py", "--variants 512"),
        ("faults.py", "--rounds 0"), ("prep_faults.py", "--images 0"), ("prep_agreement.py", "--batch-size 0"),
        ("prep_rates.py", "--repeats 0"), ("probe.py", "--penalty 0"), ("scaling.py", "--seconds 0"),
        ("resume_noise.py", "--execution fast"), ("throughput.py", "--json /dev/null/x.json"),
        ("executor.py", "--json /"), ("kernel.py", "--json /proc/x.json"),
    ],
)  # fmt: skip
def test_every_benchmark_refuses_what_it_cannot_do_or_write_before_it_begins(
    benchmark: str, words: str, refused: Refusal
) -> None:
    assert refused(benchmark, *words.split()).startswith(f"{words.split()[0]}: ")


def test_loaders_agree_where_the_last_batch_has_fewer_images_than_there_are_ranks(
    photo_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ffcv")
    for number, path in enumerate(sorted(photo_folder.glob("*/*.jpg"))[:5]):
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / f"{number}.jpg").write_bytes(path.read_bytes())
    done = run("--data", tmp_path, "--batch-size", 4, "--image-size", 16, benchmark="prep_agreement.py")
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:4] for line in done.stdout.splitlines()]
    assert lines == [
        [str(ranks), "ranks"[: 4 + (ranks > 1)], loader, "5"]
        for ranks in (1, 2, 4)
        for loader in ("torch", "dali", "ffcv")
    ]


def test_a_picture_that_cannot_be_drawn_is_told_before_anything_is_measured(tmp_path: Path, refused: Refusal) -> None:
    line = refused("throughput.py", "--quick", "--plot", tmp_path / "rates.bmp")
    assert line.endswith("pictures are .png, .svg or .pdf")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("composit-size=16", "--options composit-size=16: no option of a step; did you mean composite-size?"),
        ("foo=1", "--options foo=1: no option of a step; there are composite-size, lengths-per-step, mmnn-every"),
        ("mmnn-every=often", "--options mmnn-every: 'often' is not a whole number"),
        ("composite-size=65", "composite_size: 65 is no size between 4 and the 64 of --image-size"),
    ],
)
def test_the_step_benchmark_names_options_that_it_cannot_measure(
    capsys: pytest.CaptureFixture[str], option: str, told: str
) -> None:
    assert step.main(["--size", "64", "--options", "none", option]) == 2
    assert capsys.readouterr().err.startswith(f"step.py: error: {told}")


def test_the_step_benchmark_runs_anywhere(tmp_path: Path) -> None:
    options = ("--options", "none", "composite-size=16,lengths-per-step=1,mmnn-every=2")
    words = ("--batch-sizes", 4, "--size", 32, "--steps", 1, "--methods", "moco", "--json", tmp_path / "step.json",
             *options)  # fmt: skip
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "step.py", *map(str, words)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, cocor, cheaper = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert cocor["cocor"] and not plain["cocor"] and min(plain["images_per_s"], cocor["images_per_s"]) > 0
    assert [row["option"] for row in (plain, cocor, cheaper)] == ["none", *options[1:]]
    assert (cocor["memory_gib"] is None) == (not torch.cuda.is_available())  # a CPU's is not measured
    for row, units in ((plain, 4), (cocor, 4 + 1 + 9 + 1.5), (cheaper, 4 + 1 + 0.75 + 0.75)):  # 2 labelled images of 4
        assert row["forward_equivalents_per_s"] == pytest.approx(units * row["images_per_s"])


@pytest.mark.parametrize(("loader", "stage"), [("torchvision", "decode"), ("torch", "decode"), ("synthetic", "crops")])
def test_no_epoch_ends_while_a_row_is_timed(
    loader: Contender, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's DataLoader would start new worker processes, which takes longer than a batch."""
    epochs: list[int] = []

    def count(kind: type, method: str) -> None:
        begin = getattr(kind, method)

        def counted(self: Any, *words: int) -> Any:
            epochs.append(1)
            return begin(self, *words)

        monkeypatch.setattr(kind, method, counted)

    count(DataLoader, "__iter__")
    count(SyntheticLoader, "epoch")
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.jpg")
    dataset = open_images(tmp_path, 4).dataset()
    request = Request(loader, stage, dataset, 2048, 8, torch.device("cpu"), torch.float32, 1, 0.65)
    with closing(open_source(request)) as source:
        sizes = [size for size, _ in itertools.islice(source.batches, 6)]
    assert sizes == [2048] * 6 and epochs == [1]


def test_ffcv_reads_the_images_that_the_other_loaders_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of another folder whose files have the same names and sizes in pixels."""
    monkeypatch.setattr("images.cache_folder", lambda: tmp_path / "cache")
    brightest = []
    for colour in ("red", "blue"):
        file = tmp_path / colour / "0.png"
        file.parent.mkdir()
        Image.new("RGB", (8, 8), colour).save(file)
        with open_stored(store(open_images(file.parent, 1))).image(0).decode() as image:
            brightest.append(int(np.argmax(image.getpixel((4, 4)))))
    assert brightest == [0, 2]


def test_two_processes_may_store_the_same_images_at_once(
    photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("images.cache_folder", lambda: tmp_path)
    images = open_images(photo_folder, 4)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # neither sees the other's file
    assert store(images) == store(images)


def test_a_loader_that_fails_costs_its_own_cell_only(photo_folder: Path) -> None:
    images = open_images(photo_folder, 16)
    settings = Settings(False, 1, 4, 16, 1, 0.1, 0.65, "no_such_network")
    cell = measure("synthetic", "step", images, settings)
    assert isinstance(cell, Absent) and "no_such_network" in cell.reason


def test_processes_report_results_exceptions_and_crashes() -> None:
    fine, raised, crashed = in_processes([(os.getppid, ()), (int, ("x",)), (os.abort, ())], 60)
    assert isinstance(fine, int)
    assert raised.startswith("ValueError: invalid literal")
    assert crashed == "ended by signal 6"
    assert in_processes([(time.sleep, (60,))], 0.5) == ["no result within 0 s"]
    with pytest.raises(UserError, match="invalid literal"):
        alone(int, "x")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_measuring_process_outlives_its_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    """It would disturb what is measured next."""
    told, folder = tmp_path / "process", str(ROOT / "benchmarks")
    work = f"import os, pathlib, time; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    script = f"import sys; sys.path.insert(0, {folder!r}); import processes; processes.alone(exec, {work!r})"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, start_new_session=True) as benchmark:
        wait_until(lambda: told.exists() and told.read_text() != "")
        benchmark.send_signal(number)
        assert benchmark.wait(60) != 0
    wait_until(lambda: not Path("/proc", told.read_text()).exists())


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_windows_count_samples_time_and_whole_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wound_by_hand(timing, monkeypatch)

    def bursts() -> Iterator[int]:
        while True:
            clock.sleep(0.03)
            yield from (10, 10, 10)

    windows = time_windows(bursts(), 0.3, burst=3)
    assert len(windows) == 3
    for window in windows:
        assert len(window.intervals) == 12 and sum(window.intervals) == pytest.approx(window.seconds)
        assert window.samples == 120 and window.rate == pytest.approx(1000)
    assert (milliseconds(windows, 99), milliseconds(windows, 50)) == (pytest.approx(30), 0)


def test_batches_that_finish_while_the_cpu_time_is_read_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader goes on meanwhile: windows that did not count that time would be too fast."""
    clock, made = wound_by_hand(timing, monkeypatch), 1000.0

    def read_slowly() -> cpu_time.Reading:
        clock.sleep(0.05)
        return cpu_time.Reading(clock.now, clock.now)  # one core is busy

    def loader() -> Iterator[int]:
        nonlocal made
        while True:
            made += 0.03
            clock.sleep(max(0.0, made - clock.now))
            yield 10

    monkeypatch.setattr(timing.cpu_time, "read", read_slowly)
    windows = time_windows(loader(), 0.9)
    assert sum(w.samples for w in windows) / sum(w.seconds for w in windows) == pytest.approx(10 / 0.03)
    assert all(window.cores == pytest.approx(1) for window in windows)


def test_batches_that_finish_while_ranks_agree_are_in_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU goes on with the two in flight: a window that counted them would be too fast."""
    clock, finished = wound_by_hand(timing, monkeypatch), 0

    def device() -> Iterator[int]:
        nonlocal finished
        while True:
            if finished:
                finished -= 1
            else:
                clock.sleep(0.03)
            yield 10

    def agree(number: int) -> int:
        nonlocal finished
        finished = 2
        return number

    windows = time_together(device(), 0.3, agree)
    assert len(windows) == 3 and not finished
    assert all(window.rate == pytest.approx(10 / 0.03) for window in windows)


def test_a_slow_stream_gets_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = wound_by_hand(timing, monkeypatch)

    def slow() -> Iterator[int]:
        while True:
            clock.sleep(0.05)
            yield 1

    assert len(time_windows(slow(), 0.01)) == 1


def test_cpu_time_is_that_of_all_descendants() -> None:
    before = cpu_time.read()
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run(["sh", "-c", f"{sys.executable} -c '{burn}'; true"], check=True)
    after = cpu_time.read()
    used, passed = after.used - before.used, after.moment - before.moment
    assert 0.35 < used < passed * 2 + 0.2 and after.cores_since(before) == used / passed


def test_cpu_time_is_that_of_children_at_work() -> None:
    burn = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint('done', flush=True)\nsys.stdin.read()"
    before = cpu_time.read()
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        at_work = cpu_time.read()
        assert child.stdin is not None
        child.stdin.close()
    ended = cpu_time.read()
    assert 0.35 < at_work.used - before.used <= ended.used - before.used + 0.02  # counted once, alive or not
    assert ended.used - at_work.used < 0.3


def test_no_more_cores_are_busy_than_there_are() -> None:
    """Where threads compete for the interpreter's lock, so that looking after CPU time takes long itself."""
    over, data = threading.Event(), bytes(1 << 22)

    def decode() -> None:
        while not over.is_set():
            hashlib.sha256(data).digest()
            for _ in range(60_000):
                pass

    def batches() -> Iterator[int]:
        while True:
            time.sleep(0.02)
            yield 1

    threads = [threading.Thread(target=decode, daemon=True) for _ in range(8 * available_cores())]
    for thread in threads:
        thread.start()
    windows = time_windows(batches(), 1.5)
    over.set()
    for thread in threads:
        thread.join()
    assert all(0 < window.cores < 1.02 * available_cores() for window in windows)


def test_percentiles_of_batches() -> None:
    window = Window(4, 1.0, 1.0, (0.1, 0.2, 0.3, 0.4))
    assert milliseconds([window], 50) == pytest.approx(300)
    assert milliseconds([window], 99) == pytest.approx(400)


def test_made_up_photographs_have_the_sizes_and_bytes_of_imagenet(tmp_path: Path) -> None:
    pytest.importorskip("skimage")
    folder = make_photographs(24, tmp_path / "a")
    files = sorted(folder.glob("*/*.jpg"), key=lambda path: path.name)
    assert len(files) == 24
    for path, (width, height, kilobytes) in zip(files, IMAGENET, strict=False):
        assert Image.open(path).size == (width, height)
        assert path.stat().st_size == pytest.approx(1000 * kilobytes, rel=0.2)
    again = make_photographs(24, tmp_path / "b")
    assert all((again / path.relative_to(folder)).read_bytes() == path.read_bytes() for path in files)
    table = np.array(IMAGENET)
    assert 105 < table[:, 2].mean() < 120 and 180_000 < table[:, :2].prod(1).mean() < 200_000


def test_reference_decoders_decode_the_pixels() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((120, 80), Image.Resampling.BILINEAR).save(buffer, "JPEG", quality=95)
    expected = np.asarray(references.pillow_decoder()[0](buffer.getvalue())).astype(int)
    decode, name = references.turbo_decoder()
    found: Any = decode(buffer.getvalue())
    pixels = found.permute(1, 2, 0).numpy() if isinstance(found, torch.Tensor) else found
    assert pixels.shape == expected.shape == (80, 120, 3) and np.abs(pixels - expected).mean() < 10
    assert "libjpeg-turbo" in name


def test_images_that_libjpeg_turbo_cannot_decode_do_not_count_as_decoded(photo_folder: Path, tmp_path: Path) -> None:
    jpeg = next(photo_folder.glob("*/*.jpg"))
    Image.open(jpeg).save(tmp_path / "0.png")
    (tmp_path / "1.jpg").write_bytes(jpeg.read_bytes())
    paths = [str(tmp_path / name) for name in ("0.png", "1.jpg")]
    _, name = references.turbo_decoder()
    with references.decoding(references.turbo_decoder, paths, 1) as (counts, note):
        assert next(counts) > 0 and note == f"{name}, 1 of 2 images"
    with (
        pytest.raises(UserError, match="can decode none of the images"),
        references.decoding(references.turbo_decoder, paths[:1], 1),
    ):
        pass
