"""BatchNorm over the batches of all ranks, as SimSiam, BYOL and INTL use it.

On GPUs it is PyTorch's ``nn.SyncBatchNorm``, which has no CPU version; on the CPU :class:`GlobalBatchNorm`, made of
differentiable operations. Both have BatchNorm's parameters and buffers under the same names, and neither updates the
running statistics while ``track_running_stats`` is off.
"""

from typing import Any

import torch
import torch.distributed as dist
from timm.layers import SyncBatchNormAct
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _MeanOverRanks(torch.autograd.Function):
    """The mean over ranks, in the forward and the backward pass: every rank's result depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _mean(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _mean(gradient)


def _mean(tensor: Tensor) -> Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result)
    return result.div_(dist.get_world_size())


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm of (N, C) or (N, C, H, W) over the equally large batches of all ranks, followed by its child modules:
    timm's variants hold a dropout and an activation."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        result = self._over_ranks(input) if self.training and dist.is_initialized() else super().forward(input)
        for part in self.children():
            result = part(result)
        return result

    def _over_ranks(self, input: Tensor) -> Tensor:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        precise = input.to(torch.promote_types(input.dtype, torch.float32))
        mean = _MeanOverRanks.apply(precise.mean(axes))
        centred = precise - mean.view(shape)
        variance = _MeanOverRanks.apply(centred.square().mean(axes))
        if self.track_running_stats and self.running_mean is not None:
            self._move(mean.detach(), variance.detach(), input.numel() // input.shape[1] * dist.get_world_size())
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        result = centred * scale.view(shape)
        return (result if self.bias is None else result + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _move(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), share)


def synchronise_batch_norm(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` with every BatchNorm in it normalising over all ranks; parameters and buffers stay what they are."""
    if isinstance(module, _BatchNorm):
        return _synchronised(module, device)
    for name, child in module.named_children():
        setattr(module, name, synchronise_batch_norm(child, device))
    return module


def _synchronised(norm: _BatchNorm, device: torch.device) -> nn.Module:
    children = dict(norm.named_children())  # timm's variants: a dropout and an activation
    kind: type[_BatchNorm] = GlobalBatchNorm
    if device.type == "cuda":
        kind = SyncBatchNormAct if children else nn.SyncBatchNorm
    result = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    result._parameters, result._buffers = norm._parameters, norm._buffers
    for name, part in children.items():
        result.add_module(name, part)
    return result.train(norm.training)
