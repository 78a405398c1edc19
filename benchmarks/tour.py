"""Show CoCor from images to neighbours, in cells.

Open this file in VS Code, or in Jupyter with jupytext: every ``# %%`` begins a cell, and pictures appear below. As a
script, ``python benchmarks/tour.py`` takes about two minutes on 2 cores and leaves the pictures in runs/tour.
"""

# %% What is trained: the demo's recipe on its photographs, for a few epochs
from contextlib import closing
from pathlib import Path

import cocor
import loaders
from cocor.data import open_data, training_plan
from cocor.eval.cli import main as evaluate
from cocor.monitor.view_sheet import save_view_sheet

DATA = "demo"  # or a folder with train/ and val/ of class folders
RUN = Path("runs/tour")
RECIPE = Path(cocor.__file__).parents[1] / "configs/demo.yaml"

config = cocor.configure(RECIPE, data=DATA, output=RUN, overwrite=True, loader="torch", epochs=5, knn_every=1)


def show(picture: Path) -> None:
    """Show a picture below the cell, or say where it is."""
    if "get_ipython" in globals():
        from IPython.display import Image, display

        display(Image(picture))
    else:
        print(f"picture: {picture}")


# %% What the network sees: an image, its two contrastive views, composites of one, two and three augmentations
images = open_data(config).train
order = loaders.BatchOrder(len(images), batch_size=8, seed=1)
with closing(loaders.open_loader("torch", images, training_plan(config), order, workers=0)) as loader:
    batch = next(loader.epoch(0))
sheet = RUN.parent / "tour-views.png"
save_view_sheet(batch, sheet, config.mean, config.std)
show(sheet)
print("how often each augmentation made the longest composites:", batch.composition[-1].sum(0).tolist())

# %% Train. The curves: k-NN accuracy, losses, and the similarities of composites with the targets that the MMNN sets
run = cocor.pretrain(config)
show(run / "plot.png")

# %% What the encoder finds similar: held-out images, and their nearest training images
usual = ["--data", DATA, "--output", str(run / "eval")]
evaluate(["retrieval", str(run), *usual, "--queries", "6"])
show(run / "eval/retrieval.png")

# %% How similar it sees an image and its composites, by their length, and what the MMNN asks for
evaluate(["consistency", str(run), *usual, "--images", "200"])
show(run / "eval/consistency.png")
