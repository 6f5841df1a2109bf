"""Muon for the matrices of layers, AdamW for everything else.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by the nearest matrix whose singular values are about
equal. On models of this size it needs about two thirds of the time of AdamW alone.
"""

import math
from collections import defaultdict

import torch
from torch import nn

MATRIX_RATE = 0.7
MATRIX_DECAY = 0.05
MOMENTUM = 0.95
BETAS = (0.9, 0.98)
CLIP_NORM = 1.0
# Coefficients of the quintic iteration that drives singular values towards 1, and how often it is done.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def evened(matrices: torch.Tensor) -> torch.Tensor:
    """[count, rows, columns] with singular values near 1."""
    a, b, c = QUINTIC
    is_high = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_high else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(1, 2) if is_high else x


class Optimizer:
    """Updates the parameters of some modules."""

    def __init__(self, modules: list[nn.Module]):
        named = [(name, p) for module in modules for name, p in module.named_parameters()]
        matrices = [p for name, p in named if p.dim() == 2 and ("layers" in name or "connector" in name)]
        of_layers = {id(p) for p in matrices}
        self.parameters = [p for _, p in named]
        self.groups = defaultdict(list)
        for p in matrices:
            self.groups[tuple(p.shape)].append(p)
        self.momentum = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}
        rest = [p for p in self.parameters if id(p) not in of_layers]
        self.adam = torch.optim.AdamW(rest, betas=BETAS, weight_decay=0.0, fused=True)

    def update(self, loss: torch.Tensor, rate: float) -> None:
        """One step down the gradient of `loss`."""
        for p in self.parameters:
            p.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.parameters if p.grad is not None], CLIP_NORM)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.update_matrices(rate)

    @torch.no_grad()
    def update_matrices(self, rate: float) -> None:
        """The matrices' part; those without a gradient stay as they are."""
        for shape, group in self.groups.items():
            used = [i for i, p in enumerate(group) if p.grad is not None]
            if not used:
                continue
            gradient = torch.stack([group[i].grad for i in used])
            momentum = self.momentum[shape][used].lerp(gradient, 1 - MOMENTUM)
            self.momentum[shape][used] = momentum
            steps = evened(gradient.lerp(momentum, MOMENTUM)) * (rate * MATRIX_RATE * math.sqrt(max(shape)))
            for i, step in zip(used, steps, strict=True):
                group[i].mul_(1 - rate * MATRIX_DECAY).sub_(step)

    def state(self) -> dict:
        """What `load` takes."""
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load(self, state: dict) -> None:
        """Goes on from the state of an earlier run."""
        self.adam.load_state_dict(state["adam"])
        self.momentum = state["momentum"]
