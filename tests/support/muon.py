"""torch.optim.Muon, which torch has from 2.9 on."""

import pytest
import torch


def muon(parameters, *args, **options):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon comes with torch 2.9")
    return torch.optim.Muon(parameters, *args, **options)
