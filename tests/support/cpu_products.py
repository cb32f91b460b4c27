"""Random GEMMs of the CPU kernels against float64: what their tests and ``make sanitize`` share."""

import contextlib
import os
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch.nn.functional import conv2d, cross_entropy
from torch.nn.grad import conv2d_input, conv2d_weight

from lightning_nm import NMPattern
from lightning_nm.functional import nm_mask
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.kernels import routing
from lightning_nm.kernels.api import Convolution, MaskedMatrix
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel, library

REASON = library.unavailable()
needs_library = pytest.mark.skipif(bool(REASON), reason=REASON)
FAST = ("-O0",)
"""Flags of a library of which a test asks what it has: they compile it sooner, and it need not be fast."""

LEVELS = library.LEVELS if REASON else library.LEVELS[: library.load().nm_best_level() + 1]
KERNELS = (CpuPermuteKernel(), CpuCsrKernel())
STORAGES = ("rows", "columns", "other")
DTYPES = (torch.float32, torch.bfloat16)


@contextlib.contextmanager
def at_level(level):
    """Use an instruction set."""
    with mock.patch.dict(os.environ, LIGHTNING_NM_ISA=level):
        library.level.cache_clear()
        try:
            yield
        finally:
            library.level.cache_clear()


def has_kernel(kernel, level):
    return kernel.name != "cpu-permute" or level != "baseline"


class Case(NamedTuple):
    """A sparse matrix with what it is multiplied by, and its values in float64."""

    matrix: MaskedMatrix
    mask: torch.Tensor
    exact: torch.Tensor  # masked, [rows, depth], its depth in the order of the GEMMs
    x: torch.Tensor
    bias: torch.Tensor | None
    grad: torch.Tensor
    right: torch.Tensor


def pattern_mask(rows, depth, pattern, generator):
    padded = torch.rand(rows, depth + -depth % pattern.m, generator=generator)
    return nm_mask(padded, pattern)[:, :depth]


def random_mask(rows, depth, density, generator):
    """A mask without a pattern, some of whose rows are empty."""
    mask = torch.rand(rows, depth, generator=generator) < density
    return mask & (torch.rand(rows, 1, generator=generator) < 0.8)


def within(tensor):
    """A contiguous copy that begins in the middle of its memory."""
    return torch.stack([tensor, tensor])[1]


def case(
    rows,
    depth,
    tokens,
    pattern=None,
    dtype=torch.float32,
    weight_dtype=torch.float32,
    storage="rows",
    permuted=False,
    bias=True,
    bit=FORWARD_BIT,
    seed=0,
):
    """Random operands; `storage` says which axis is contiguous, or that the weight's strides are not the mask's."""
    generator = torch.Generator().manual_seed(seed)
    pattern = None if pattern is None else NMPattern.parse(pattern)
    if pattern is None:
        mask = random_mask(rows, depth, 0.3, generator)
    else:
        mask = pattern_mask(rows, depth, pattern, generator)
    weight = torch.randn(rows, depth, generator=generator).to(weight_dtype)
    exact = torch.where(mask, weight.to(dtype).double(), 0)
    order = None
    if permuted:  # in memory the depth has another order
        order = torch.randperm(depth, generator=generator)
        weight, kept = torch.empty_like(weight).index_copy_(1, order, weight), mask
        mask = torch.empty_like(mask).index_copy_(1, order, kept)
    noise = torch.randint(0, 256, (rows, depth), generator=generator, dtype=torch.uint8) & (
        255 - bit
    )
    bits = noise | mask.to(torch.uint8) * bit  # other bits belong to other masks
    if storage == "columns" or permuted:
        bits, weight = within(bits.t()).t(), within(weight.t()).t()
    else:
        bits, weight = within(bits), within(weight)
    if storage == "other":
        weight = torch.stack([weight, torch.full_like(weight, torch.nan)], -1)[..., 0]
    matrix = MaskedMatrix(weight, bits, bit, pattern, dtype, order, lambda: exact.to(dtype))

    def normal(*shape):
        return within(torch.randn(shape, generator=generator).to(dtype))

    return Case(
        matrix,
        mask if order is None else mask[:, order],  # a kept weight may be zero
        exact,
        normal(tokens, depth),
        normal(rows) if bias else None,
        normal(tokens, rows),
        normal(depth, tokens),
    )


def assert_close(found, exact, magnitude, terms):
    """Within the rounding errors of a float32 sum of `terms`, and of one rounding to the dtype of the result.

    `magnitude` is the sum of absolute values.
    """
    bound = (terms + 2) * 2.0**-24 * magnitude
    if found.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * (exact.abs() + bound)
    wrong = ~((found.double() - exact).abs() <= bound)
    assert not wrong.any(), f"{found[wrong][:4]} instead of {exact[wrong][:4]}"


def compare(kernel, case):
    """Every GEMM of a kernel with float64; they are returned."""
    layout = kernel.layout(case.matrix)
    replace(layout)  # which checks it
    packed = kernel.pack_masked(case.matrix, layout)
    exact, x, grad, right = case.exact, case.x.double(), case.grad.double(), case.right.double()
    bias = 0 if case.bias is None else case.bias.double()
    linear = kernel.linear(packed, case.x, case.bias)
    size = x.abs() @ exact.abs().t() + (0 if case.bias is None else bias.abs())
    assert_close(linear, x @ exact.t() + bias, size, exact.shape[1] + 1)
    sampled = kernel.sampled(layout, case.grad, case.x)
    expected = torch.where(case.mask, grad.t() @ x, 0)
    assert_close(sampled, expected, torch.where(case.mask, grad.abs().t() @ x.abs(), 0), len(x))
    assert not sampled[~case.mask].any()
    products = [linear, sampled]
    if kernel.name == "cpu-csr":
        matmul = kernel.matmul(packed, case.right)
        assert_close(matmul, exact @ right, exact.abs() @ right.abs(), exact.shape[1])
        products.append(matmul)
    return products


class ConvCase(NamedTuple):
    """A convolution with a sparse weight, in float64."""

    conv: Convolution
    matrix: MaskedMatrix
    mask: torch.Tensor  # of the weight
    exact: torch.Tensor  # masked weight
    x: torch.Tensor
    bias: torch.Tensor | None
    grad: torch.Tensor


def conv_case(conv, images, density=0.3, dtype=torch.float32, bias=True, seed=0):
    """Random operands; some output channels have no entries."""
    generator = torch.Generator().manual_seed(seed)
    out, *rest = conv.weight_shape
    mask = random_mask(out, torch.Size(rest).numel(), density, generator)
    weight = torch.randn(mask.shape, generator=generator)
    exact = torch.where(mask, weight.to(dtype).double(), 0)
    matrix = MaskedMatrix(
        weight, mask.view(torch.uint8), FORWARD_BIT, None, dtype, None, lambda: exact.to(dtype)
    )

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return ConvCase(
        conv,
        matrix,
        mask.view(conv.weight_shape),
        exact.view(conv.weight_shape),
        normal(images, conv.inputs, *conv.size),
        normal(out) if bias else None,
        normal(images, out, *conv.positions),
    )


def compare_conv(kernel, case):
    """The three GEMMs of a convolution with float64; they are returned."""
    conv, exact, x, grad = case.conv, case.exact, case.x.double(), case.grad.double()
    layout = kernel.layout(case.matrix)
    replace(layout)  # which checks it
    packed = kernel.pack_masked(case.matrix, layout)
    rest = (conv.stride, conv.padding, conv.dilation, conv.groups)

    def products(weight, x, bias, grad):
        kept = torch.where(case.mask, conv2d_weight(x, exact.shape, grad, *rest), 0)
        return (
            conv2d(x, weight, bias, *rest),
            conv2d_input(x.shape, weight, grad, *rest),
            kept.flatten(1),
        )

    bias = None if case.bias is None else case.bias.double()
    expected = products(exact, x, bias, grad)
    sizes = products(exact.abs(), x.abs(), None if bias is None else bias.abs(), grad.abs())
    terms = (exact[0].numel() + 1, exact[:, 0].numel(), case.grad[:, 0].numel())
    found = (
        kernel.conv(packed, case.x, conv, case.bias),
        kernel.conv_input(packed, case.grad, conv),
        kernel.conv_sampled(layout, case.grad, case.x, conv),
    )
    for a, b, size, count in zip(found, expected, sizes, terms, strict=True):
        assert_close(a, b, size, count)
    assert not found[2][~case.mask.flatten(1)].any()
    return found


def pair(draw, low, high):
    return draw.randint(low, high), draw.randint(low, high)


def random_case(draw, kernel):
    """Operands of any size and layout, with a mask that a kernel takes."""
    most, permutes = draw.choice([3, 20, 80, 300]), kernel.name == "cpu-permute"
    m = draw.choice([2, 4, 8, 16, 32] if permutes else [2, 3, 4, 7, 8, 24, 32])
    return case(
        draw.randint(1, most),
        draw.randint(1, most),
        draw.randint(0, most),
        f"{draw.randint(1, m - 1)}:{m}" if permutes or draw.random() < 0.7 else None,
        draw.choice(DTYPES),
        draw.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        draw.choice(STORAGES),
        permuted=kernel.ordered and draw.random() < 0.4,
        bias=draw.random() < 0.5,
        bit=draw.choice([1, 2, 4, 128]),
        seed=draw.randrange(1000),
    )


def random_conv(draw):
    """A convolution of any geometry that has an output, and its operands."""
    groups = draw.choice([1, 1, 2, 3])
    kernel, stride, padding, dilation = (
        pair(draw, *most) for most in ((1, 5), (1, 3), (0, 3), (1, 3))
    )
    size = tuple(
        max(1, d * (k - 1) + 1 - 2 * p) + draw.randint(0, draw.choice([2, 30]))
        for k, p, d in zip(kernel, padding, dilation, strict=True)
    )
    channels = groups * draw.randint(1, 8), groups * draw.randint(1, 12)
    conv = Convolution(*channels, size, kernel, stride, padding, dilation, groups)
    density, dtype = draw.choice([0, 0.1, 1]), draw.choice(DTYPES)
    return conv_case(
        conv, draw.randint(1, 4), density, dtype, draw.random() < 0.5, draw.randrange(1000)
    )


def misread(tensor):
    """A tensor as the library would misread it: its dtype, its last size, its strides, its dimensions, its device."""
    return [
        tensor.double(),
        tensor.half(),
        tensor[..., :-1].contiguous(),
        tensor.repeat_interleave(2, -1)[..., ::2],
        tensor[None],
        tensor.to("meta"),
    ]


def trained(model, sparsifier, router, batches, dtype):
    """Train a classifier on batches, its GEMMs by a router; return the losses and the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    sparsifier.register(optimizer)
    losses = []
    for x in batches:
        with routing(router), torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            loss = cross_entropy(model(x).float(), torch.arange(len(x)) % 10)
        loss.backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), *(parameter.detach() for parameter in model.parameters())
