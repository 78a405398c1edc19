"""Write a folder that timm loads, from the disk or from the Hugging Face Hub, and push it there."""

from pathlib import Path

import huggingface_hub
import safetensors.torch
import timm
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from timm.models._hub import save_config_for_hf

from cocor.backbone import build_backbone
from cocor.eval.export.card import model_card
from cocor.eval.export.rebuild import (
    check_same,
    only_size,
    preprocessing,
    timm_knows,
    timm_lines,
    timm_options,
    write_weights,
)
from cocor.weights.load import Encoder
from loaders.errors import UserError
from loaders.files import replacing, write_text

# What timm says of its own weights, which are not these.
_OF_TIMMS_WEIGHTS = dict.fromkeys(["tag", "license", "origin_url", "paper_name", "paper_ids", "notes"])


def write(encoder: Encoder, output: Path) -> None:
    """Write ``model.safetensors``, ``config.json`` as timm does, and a model card.

    Where timm cannot build the model by name (:func:`timm_knows`), the card has the lines that do.
    """
    write_weights(encoder, output / "model.safetensors")
    size = {"input_size": (encoder.channels, encoder.image_size, encoder.image_size)}
    about = {"pretrained_cfg": _OF_TIMMS_WEIGHTS | preprocessing(encoder) | size, "stem": encoder.stem}
    with replacing(output / "config.json") as temporary:
        save_config_for_hf(encoder.backbone, str(temporary), about, timm_options(encoder))
    write_text(output / "README.md", model_card(encoder))
    if timm_knows(encoder):
        model = timm.create_model(f"local-dir:{output}", pretrained=True)
    else:
        model = build_backbone(encoder.architecture, encoder.stem, only_size(encoder), encoder.channels)
        model.load_state_dict(safetensors.torch.load_file(output / "model.safetensors"))
    check_same(encoder, model, output)


def lines(encoder: Encoder, output: Path) -> str:
    """Return Python lines that load ``model`` from the folder."""
    if timm_knows(encoder):
        return f"import timm\nmodel = timm.create_model({f'local-dir:{output}'!r}, pretrained=True)\n"
    return timm_lines(encoder, output / "model.safetensors")


def check_push(name: str) -> None:
    """Raise UserError if nothing can be pushed as ``name``: a name that is none, or no login."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name}: {str(error).splitlines()[0]}") from None
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push {name}: no login at the Hugging Face Hub; run: hf auth login, or set HF_TOKEN")


def push(folder: Path, name: str) -> str:
    """Upload ``folder`` as the model ``name`` (OWNER/NAME), made if missing. Returns its address.

    Raises:
        UserError: no connection, or the Hub refuses.
    """
    hub = huggingface_hub.HfApi()
    try:
        place = hub.create_repo(name, exist_ok=True)
        hub.upload_folder(repo_id=place.repo_id, folder_path=folder, commit_message="Add the encoder")
    except Exception as error:  # whatever the connection runs into
        why = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise UserError(f"--push {name}: {why}; {folder} is written, push it by: hf upload {name} {folder}") from None
    return str(place)
