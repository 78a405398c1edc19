"""Build torchvision's Faster R-CNN on an encoder: C4 as in MoCo's paper, or FPN."""

import copy
from typing import Any, Literal

import torch
from timm.models.resnet import ResNet
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import roi_align

from cocor.eval.detect.recipe import Recipe
from cocor.weights.load import Encoder
from loaders.channels import luma
from loaders.errors import UserError

Detector = Literal["c4", "fpn"]
_SIZES, _RATIOS = (32, 64, 128, 256, 512), (0.5, 1.0, 2.0)  # of the anchors: sides in pixels, height / width
_LONGEST = 1333 / 800  # side of an image, by the largest of the shortest sides


def _resnet(encoder: Encoder) -> ResNet:
    """Copy the encoder; UserError unless it is a ResNet with the usual stem."""
    if not isinstance(encoder.backbone, ResNet) or encoder.stem != "imagenet":
        raise UserError(f"detect: its detectors are built on ResNets with the usual stem, such as resnet50; this is "
                        f"{encoder.architecture} with the {encoder.stem} stem")  # fmt: skip
    backbone = copy.deepcopy(encoder.backbone).cpu().train().requires_grad_(True)
    if encoder.channels == 1:  # torchvision normalises in colour
        backbone.conv1.register_forward_pre_hook(lambda _, images: luma(images[0], dim=1))
    return backbone


def _widths(backbone: ResNet) -> list[int]:
    """Return the channels of the four stages."""
    stages: list[Any] = backbone.feature_info[-4:]
    return [stage["num_chs"] for stage in stages]


def build_detector(
    kind: Detector, encoder: Encoder, classes: int, recipe: Recipe, precision: torch.dtype
) -> FasterRCNN:
    """Build a detector of ``classes`` (without background) with a copy of the encoder.

    Training images are scaled to a shortest side drawn in steps of 32 from those of ``recipe``, test images to the
    largest. Convolutions of the encoder run in ``precision``.

    Raises:
        UserError: the encoder is no ResNet with the usual stem.
    """
    backbone = _resnet(encoder)
    low, high = recipe.min_size
    sizes = {"min_size": (*range(low, high, 32), high), "max_size": round(high * _LONGEST)}
    options = {**sizes, "box_batch_size_per_image": recipe.regions}
    options |= {"image_mean": encoder.mean, "image_std": encoder.std}
    build = _c4 if kind == "c4" else _fpn
    model = build(backbone, classes + 1, precision, options)
    nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=0.01)  # as Detectron2 does
    nn.init.normal_(model.roi_heads.box_predictor.bbox_pred.weight, std=0.001)
    nn.init.zeros_(model.roi_heads.box_predictor.cls_score.bias)
    nn.init.zeros_(model.roi_heads.box_predictor.bbox_pred.bias)
    return model


class _Mixed(nn.Module):
    """Run ``inner`` in ``precision``, but return float32, in which boxes are computed."""

    def __init__(self, inner: nn.Module, precision: torch.dtype, out_channels: int = 0) -> None:
        super().__init__()
        self.inner, self.out_channels, self._precision = inner, out_channels, precision

    def forward(self, images: Tensor) -> Any:
        with torch.autocast(images.device.type, self._precision, enabled=self._precision != torch.float32):
            found = self.inner(images)
        return found.float() if isinstance(found, Tensor) else {name: value.float() for name, value in found.items()}


class _RoIAlign(nn.Module):
    """Pool boxes to 14 x 14 from features of stride 16, on Detectron2's aligned grid."""

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], shapes: list[tuple[int, int]]) -> Tensor:
        pooled: Tensor = roi_align(features["0"], boxes, 14, spatial_scale=1 / 16, sampling_ratio=0, aligned=True)
        return pooled


def _c4(backbone: ResNet, classes: int, precision: torch.dtype, options: dict[str, Any]) -> FasterRCNN:
    """Build Faster R-CNN on conv4's features; the head of regions is conv5 and BatchNorm.

    As MoCo's detectors (He et al. 2020, appendix A.3; "Res5ROIHeadsExtraNorm" of their code).
    The average over a region hides where in it an object lies, so boxes are learnt slowly.
    """
    layers = ("conv1", "bn1", "act1", "maxpool", "layer1", "layer2", "layer3")
    trunk = nn.Sequential(*(getattr(backbone, name) for name in layers))
    width, features = _widths(backbone)[-2:]
    anchors = AnchorGenerator((_SIZES,), (_RATIOS,))
    conv5: Any = backbone.layer4
    head = nn.Sequential(conv5, nn.BatchNorm2d(features), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = FasterRCNN(
        _Mixed(trunk, precision, width), rpn_anchor_generator=anchors,
        rpn_head=RPNHead(width, anchors.num_anchors_per_location()[0]),
        rpn_pre_nms_top_n_train=12_000, rpn_pre_nms_top_n_test=6000,  # Detectron2's for C4
        box_head=_Mixed(head, precision), box_predictor=FastRCNNPredictor(features, classes), **options,
    )  # fmt: skip
    model.roi_heads.box_roi_pool = _RoIAlign()  # the constructor takes the other grid only
    return model


def _fpn(backbone: ResNet, classes: int, precision: torch.dtype, options: dict[str, Any]) -> FasterRCNN:
    """Build ``fasterrcnn_resnet50_fpn`` with BatchNorm, tuned, also in the pyramid."""
    levels = {f"layer{number}": str(number - 1) for number in (1, 2, 3, 4)}
    pyramid = BackboneWithFPN(backbone, levels, _widths(backbone), 256, norm_layer=nn.BatchNorm2d)
    anchors = AnchorGenerator(tuple((size,) for size in _SIZES), (_RATIOS,) * len(_SIZES))
    return FasterRCNN(_Mixed(pyramid, precision, 256), classes, rpn_anchor_generator=anchors, **options)
