"""Make a training step: contrastive loss, consistency loss, update of the MMNN.

    1. encoder    gradient of the contrastive loss, plus slope_l times the gradient of the similarity of each length l
                  (paper, eq. 3); one SGD step to theta'. An auxiliary (``cocor.auxiliary``) adds its gradient to the
                  first, or changes its views
    2. MMNN       gradient of the labelled cross-entropy at theta' through that step (``cocor.objective.hypergradient``)
    3. classifier gradient of the same cross-entropy (paper, eq. 4 and algorithm 1)

Similarities and their gradients are computed in ``cocor.step.composites``. Parts that a step does not need are left
out: without consistency loss, with constant targets, or without a labelled batch.

A step never waits for the device. The host decides what a step trains on (``share``, see ``cocor.step.subsample``) and
sets the learning rates (``set_rates``); all the rest, ``compute``, depends on tensors alone, so that it can be captured
as a CUDA graph and replayed (``cocor.step.compile``).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from cocor.auxiliary.base import Auxiliary
from cocor.config.options import Config
from cocor.distributed.collectives import mean_over_ranks, reduce_gradients
from cocor.methods.base import Method
from cocor.objective.consistency import Consistency, latent_similarity
from cocor.objective.hypergradient import Measured, exact, inner_products, released, sample_inner_products, taylor
from cocor.step.composites import CompositeGradients, CompositeTerm, Streams, Timer
from cocor.step.derivative import factors_after, factors_before, through_clipping
from cocor.step.labelled_head import OuterObjective
from cocor.step.optim import Cosine, build_optimiser, clip, load_state, rates_to_device, set_rate, state_of
from cocor.step.subsample import StepSchedule, lengths_of, split
from loaders.batch import Batch

Metrics = dict[str, Tensor]
_LEAST = 1e-12  # rate times weight of the consistency loss by which a gradient is divided


class TrainingStep:
    """Method, MMNN and classifier with their optimisers; a call makes one step.

    ``target`` maps composition vectors to similarities: an MMNN (then ``classes`` must be given), constants, or None
    for the plain method. ``steps_per_epoch`` scales the schedules. ``auxiliary`` is trained by the encoder's optimiser.
    """

    def __init__(self, config: Config, method: Method, target: nn.Module | None, classes: int | None, *,
                 steps_per_epoch: int, precision: torch.dtype = torch.float32,
                 auxiliary: Auxiliary | None = None) -> None:  # fmt: skip
        self.config, self.method, self.target, self.precision = config, method, target, precision
        self.auxiliary = auxiliary
        self.device = next(method.parameters()).device
        self.timer: Timer = nullcontext  # a context per part of the step, see cocor.monitor.profile
        self.streams = Streams()  # on which the lengths run, concurrently with the contrastive part
        self.learning_rate = config.lr  # the encoder's in the last step
        self.subsample = StepSchedule(config, steps_per_epoch)
        total = config.epochs * steps_per_epoch
        self.schedule = Cosine(total, warmup=config.warmup_epochs * steps_per_epoch, final=config.final_lr)
        method.total_steps = total
        self.optimiser = build_optimiser(config, method, auxiliary)
        self.parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        self.composites: CompositeTerm | None = None
        if target is not None:
            self.composites = CompositeTerm(
                config, method, target, self.parameters, autocast=self.autocast, streams=self.streams
            )
        self.outer: OuterObjective | None = None
        if target is not None and any(p.requires_grad for p in target.parameters()):
            assert classes is not None
            self.outer = OuterObjective(
                config, method, target, classes, self.parameters,
                steps_per_epoch=steps_per_epoch, autocast=self.autocast,
            )  # fmt: skip

    def __call__(self, batch: Batch, labelled: Batch | None, step: int) -> Metrics:
        """Make optimiser step number ``step``; return scalars, still on the device."""
        self.set_rates(step)
        return self.named(self.compute(*self.share(batch, labelled, step)), step)

    def share(self, batch: Batch, labelled: Batch | None, step: int) -> tuple[Batch, Batch | None]:
        """Choose what step number ``step`` trains on, see :mod:`cocor.step.subsample`.

        In the MMNN's turn there must be a ``labelled`` batch.
        """
        assert labelled is not None or self.outer is None or not self.subsample.has_labelled(step)
        return self.subsample(batch, labelled, step)

    def named(self, metrics: Metrics, step: int) -> Metrics:
        """Split ``metrics`` (L,) of :meth:`compute` into scalars: ``similarity_1`` etc."""
        lengths = [self.config.lengths[place] for place in self.subsample.places(step)]
        scalars: Metrics = {}
        for name, value in metrics.items():
            if value.ndim:
                scalars |= {f"{name}_{length}": one for length, one in zip(lengths, value.unbind(), strict=True)}
            else:
                scalars[name] = value
        return scalars

    def set_rates(self, step: int) -> None:
        """Set the learning rates for optimiser step number ``step``."""
        config, factor = self.config, self.schedule(step)
        self.learning_rate = config.lr * factor
        for group in self.optimiser.param_groups:
            rate = config.lr if group["fixed_lr"] else self.learning_rate
            set_rate(group, rate * group.get("lr_share", 1.0))
        if self.outer is not None:
            self.outer.set_rates(step)

    def compute(self, batch: Batch, labelled: Batch | None) -> Metrics:
        """Make the step itself, on what ``share`` returns, at the rates that are set.

        Returns detached metrics: scalars (), and values per length (L,).
        """
        self.optimiser.zero_grad(set_to_none=True)
        term, composites, lengths = self.composites, None, None
        losses, auxiliary, metrics = list[Tensor](), None, Metrics()
        for part in split(batch, self.config.accumulate):
            of_part = term.begin(part, self.timer) if term is not None else None
            loss, auxiliary = self._contrast(part)
            losses.append(loss)
            for name, value in self.method.metrics.items():
                metrics[f"contrastive_{name}"] = metrics.get(f"contrastive_{name}", 0) + value / self.config.accumulate
            if term is not None and of_part is not None:
                lengths = term.joined(lengths, of_part)
        contrastive = torch.stack(losses).mean()
        if auxiliary is not None:
            metrics["auxiliary_loss"] = auxiliary

        if term is not None and lengths is not None:
            composites = term.finish(lengths)
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            metrics |= term.add(composites)
            consistency = composites.consistency
            metrics |= {"consistency_loss": consistency.unweighted}
            metrics |= {"similarity": consistency.similarity, "target": consistency.target}
        with self.timer("communication"):
            reduce_gradients(self._gradients())
        if self.config.clip_grad:
            metrics["gradient_norm"] = clip(self._gradients(), self.config.clip_grad)

        if composites is not None and self.outer is not None and labelled is not None:
            norm = metrics.get("gradient_norm")
            metrics |= self._step_all(self.outer, batch, labelled, contrastive, composites, norm)
        else:
            with self.timer("optimiser"):
                self.optimiser.step()
        with self.timer("optimiser"):
            if self.auxiliary is not None:
                self.auxiliary.after_step(self.method)
            self.method.after_step()
        metrics["loss"] = contrastive
        if auxiliary is not None:
            metrics["loss"] = metrics["loss"] + self.config.auxiliary_weight * auxiliary
        if composites is not None:
            metrics["loss"] = metrics["loss"] + composites.consistency.loss.detach()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to resume: weights, queues and moments."""
        return {
            name: state_of(part) if isinstance(part, Optimizer) else part.state_dict()
            for name, part in self.parts().items()
        }

    def weights(self) -> list[Tensor]:
        """Return all parameters, detached; they are equal on all ranks."""
        modules = [part for part in self.parts().values() if isinstance(part, nn.Module)]
        return [p.detach() for module in modules for p in module.parameters()]

    def rates_to_device(self) -> None:
        """Hold the learning rates on the device, where a captured step reads them."""
        for part in self.parts().values():
            if isinstance(part, Optimizer):
                rates_to_device(part)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            if isinstance(part, Optimizer):
                load_state(part, state[name])
            else:
                part.load_state_dict(state[name])

    def parts(self) -> dict[str, Any]:
        """Return all modules and optimisers with a state, by name in a checkpoint."""
        parts: dict[str, Any] = {"method": self.method, "optimiser": self.optimiser}
        if self.auxiliary is not None:
            parts["auxiliary"] = self.auxiliary
        return parts if self.outer is None else parts | self.outer.parts()

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _contrast(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Add the gradients of method and auxiliary to ``.grad``; return both losses.

        ``batch`` may be a part of several. An auxiliary gets all at once.
        """
        method, auxiliary = self.method, self.auxiliary
        if auxiliary is None:
            with self.timer("contrastive"):
                with self.autocast():
                    contrastive = method.contrastive(batch.views, batch.label)
                (contrastive / self.config.accumulate).backward()
            return contrastive.detach(), None
        with self.timer("contrastive"), self.autocast():
            kept = method.kept_features = list[Tensor]()
            contrastive = method.contrastive(auxiliary.views(batch), batch.label)
            method.kept_features = None
        with self.timer("auxiliary"):
            # Leaves: the auxiliary's gradient stops there, and goes on through the backbone with the method's.
            features = [one.detach().requires_grad_() for one in kept]
            losses = list[Tensor]()
            parts = lengths_of(batch) if auxiliary.by_length else [batch]
            for part in parts:
                with self.autocast():
                    loss = auxiliary.loss(method, part, features)
                if loss is not None:
                    (self.config.auxiliary_weight / len(parts) * loss).backward()
                    losses.append(loss.detach())
        reached = [(one, leaf.grad) for one, leaf in zip(kept, features, strict=True) if leaf.grad is not None]
        with self.timer("contrastive"):
            torch.autograd.backward([contrastive, *(one for one, _ in reached)], [None, *(grad for _, grad in reached)])
        return contrastive.detach(), torch.stack(losses).mean() if losses else None

    def _step_all(self, outer: OuterObjective, batch: Batch, labelled: Batch, contrastive: Tensor,
                  composites: CompositeGradients, norm: Tensor | None) -> Metrics:  # fmt: skip
        """Step encoder (with its gradient in ``.grad``), MMNN and classifier.

        ``norm`` is that of the gradient before it was clipped, if it was.
        """
        config = self.config
        before = None
        if config.hypergradient != "exact":
            with self.timer("hypergradient"):
                before = self._measure(outer, labelled, contrastive, composites)
        old = self._weights_copy() if config.consistency == "abs" and before is None else None
        factors = factors_before(self.optimiser) if before is None else None
        with self.timer("optimiser"):
            self.optimiser.step()
        with self.timer("labelled"):
            cross_entropy, accuracy, gradient = outer.classify(labelled)
        target, curvature = composites.target, composites.consistency.curvature
        metrics: Metrics = {"target_moved": outer.moved(batch.composition, target)}
        rate = self.optimiser.param_groups[0]["lr"]
        if before is not None:
            with self.timer("hypergradient"):
                after, moved = self._remeasure(batch, composites, cross_entropy)
            if config.hypergradient == "released":
                surrogate = released(target, moved.curvature, before, after)
            else:
                surrogate = taylor(target, curvature, before, after)
        else:
            gradient = self._through_step(outer, gradient, factors, norm)
            products = self._products(outer, batch, composites, gradient, old)
            surrogate = exact(target, curvature, products, rate)
            metrics |= _of_products(products)
        norm = outer.step(surrogate, self.timer, 1.0 if config.mmnn_optimiser == "sgd" else self._scale(rate))
        return metrics | {"labelled_loss": cross_entropy, "labelled_accuracy": accuracy, "hypergradient_norm": norm}

    def _through_step(self, outer: OuterObjective, gradient: list[Tensor], factors: list[Tensor] | None,
                      norm: Tensor | None) -> list[Tensor]:  # fmt: skip
        """Multiply the cross-entropy's gradient with the derivative of the step just made.

        Returns tensors for the backbone's parameters or, as clipping couples all, for the encoder's.
        """
        for factor in (factors, factors_after(self.optimiser)):
            if factor is not None:
                gradient = list(torch._foreach_mul(gradient, outer.of_backbone(factor)))
        if norm is None:
            return gradient
        return through_clipping(
            outer.with_zeros(gradient, self.parameters), self._gradients(), norm, self.config.clip_grad
        )

    def _scale(self, rate: float | Tensor) -> float | Tensor:
        """Return what makes the MMNN's gradient independent of rate and loss weight."""
        step = rate * self.config.consistency_weight
        return 1.0 / (step.clamp_min(_LEAST) if isinstance(step, Tensor) else max(step, _LEAST))

    def _products(self, outer: OuterObjective, batch: Batch, composites: CompositeGradients, gradient: list[Tensor],
                  old: dict[str, Tensor] | None) -> Tensor:  # fmt: skip
        """Multiply the similarities' gradients with that of the cross-entropy.

        Returns (L,), for the abs loss (L, B), which needs ``old``, the weights before the step.
        """
        of: Callable[[Sequence[Tensor]], list[Tensor]]
        of = list if len(gradient) == len(self.parameters) else outer.of_backbone
        if old is None:
            return inner_products([of(row) for row in composites.gradients], gradient, mean_over_ranks)
        name_of = {id(p): name for name, p in self.method.named_parameters()}
        pairs = zip(of(self.parameters), gradient, strict=True)
        direction = {name_of[id(p)]: part for p, part in pairs if id(p) in name_of}  # an auxiliary's embed nothing
        on_cpu = self.device.type == "cpu"  # whose mixed-precision convolutions have no forward-mode derivative
        images = batch.composites.to(composites.originals.dtype) if on_cpu else batch.composites
        with self.timer("hypergradient"), nullcontext() if on_cpu else self.autocast():
            return sample_inner_products(self.method, images, composites.originals, direction, old)

    def _weights_copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.method.named_parameters() if p.requires_grad}

    def _measure(self, outer: OuterObjective, labelled: Batch, contrastive: Tensor,
                 composites: CompositeGradients) -> Measured:  # fmt: skip
        loss = mean_over_ranks(contrastive) + composites.consistency.loss.detach()
        with torch.no_grad():
            cross_entropy = mean_over_ranks(F.cross_entropy(outer.logits(labelled), labelled.label))
        return Measured(loss, cross_entropy, composites.consistency.compared)

    @torch.no_grad()
    def _remeasure(self, batch: Batch, composites: CompositeGradients,
                   cross_entropy: Tensor) -> tuple[Measured, Consistency]:  # fmt: skip
        """Measure the same batch at the new weights, with targets from before."""
        term = self.composites
        assert term is not None
        with self.autocast():
            contrastive = self.method.reevaluate(batch.views, batch.label)
            embeddings = torch.stack([self.method.embed_composite(images) for images in batch.composites])
        similarity = latent_similarity(embeddings, term.originals(batch))
        consistency = term.consistency(similarity, composites.target)
        loss = mean_over_ranks(contrastive) + consistency.loss
        return Measured(loss, cross_entropy, consistency.compared), consistency


def _of_products(products: Tensor) -> Metrics:
    """Return mean, its square and sign of ``<grad CE, grad sim_l>``, each (L,)."""
    # Above 0 a higher similarity raises the cross-entropy, so that the MMNN lowers its target.
    mean = products if products.ndim == 1 else products.mean(1)
    return {"product": mean, "product_squared": mean.square(), "product_positive": (mean > 0).float()}
