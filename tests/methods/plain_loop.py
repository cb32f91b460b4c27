"""A plain loop, for tests of what a method does at which step."""

import torch


def sgd_steps(model, sparsifier, steps, batch):
    """Train by SGD on random batches of this shape, and yield after each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    for step in range(steps):
        model(torch.randn(batch)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        yield step
