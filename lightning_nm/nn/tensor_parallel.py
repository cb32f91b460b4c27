"""Linear layers that tensor parallelism shards: each process multiplies its shard under its part of the masks.

``ColwiseParallel`` gives each process rows of W and so outputs of its own; the gradients of X add up over the
processes. ``RowwiseParallel`` gives it columns of W and the inputs that belong to them; the GEMMs add up to Y. The
selection sees to it that no block lies in two shards.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products import nm_linear
from lightning_nm.nn.weight import local_shard


def parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: NMLayer) -> Tensor:
    """``x @ W_F^T + bias``, a DTensor: its last dimension sharded if W's rows are, else replicated.

    Args:
        x: ``[..., in]``, a DTensor, or a plain tensor that is equal in all processes.
        weight: ``[out, in]``, a DTensor, replicated or sharded along one dimension, over a mesh of one dimension.
        bias: ``[out]`` or ``None``, sharded as W's rows are.
        layer: The layer of all of W.

    Raises:
        RuntimeError: If FSDP should have gathered the weight, or has and was not known, naming the layer.
    """
    if not isinstance(weight, DTensor):
        raise RuntimeError(
            f"layer '{layer.name}' was taken for tensor parallel, but FSDP gathers its weight: give the sparsifier the "
            "module that fully_shard was given, not a part of it"
        )
    if layer.view.wrappers and not layer.spec.tensor_parallel:
        raise RuntimeError(
            f"layer '{layer.name}' was called while FSDP holds its weight in shards: call the module that fully_shard "
            "was given, whose hooks gather it, not its parts"
        )
    mesh = weight.device_mesh
    (placement,) = weight.placements
    # A plain input is the same in all processes.
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    by_rows = placement.is_shard(0)
    by_columns = placement.is_shard(1)
    last_dimension = x.dim() - 1
    x = x.redistribute(mesh, [Shard(last_dimension) if by_columns else Replicate()])
    # Each process with rows of its own has a part of the sum that is dX.
    grad_placements = [Partial()] if by_rows else x.placements
    local_x = x.to_local(grad_placements=grad_placements)
    # dW of a shard is complete in the process that holds it: nothing is added up.
    local_weight = weight.to_local(grad_placements=weight.placements)
    # Processes with columns add their GEMMs up: the bias is added once, to the sum.
    local_bias = None if by_columns else bias
    if isinstance(local_bias, DTensor):
        local_bias = local_bias.to_local()
    bits = layer.masks.bits
    local_bits = None if bits is None else local_shard(bits, weight)
    local_layer = layer.with_parts(masks=layer.masks.with_bits(local_bits))
    # Without a router: what it keeps belongs to one layer object, and this one lives for one call.
    y = nm_linear(local_x, local_weight, local_bias, local_layer, routed=False)
    if not by_columns:
        placements = [Shard(last_dimension) if by_rows else Replicate()]
        return DTensor.from_local(y, mesh, placements, run_check=False)
    # Each process made the GEMMs of its inputs; their sum is Y.
    partial = DTensor.from_local(y, mesh, [Partial()], run_check=False)
    whole = partial.redistribute(mesh, [Replicate()])
    return whole if bias is None else whole + bias
