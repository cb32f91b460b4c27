"""Convolutions of the CPU library against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu import CpuCsrKernel
from tests.support.cpu_products import LEVELS, at_level, compare_conv, conv_case, needs_library

pytestmark = needs_library

KERNEL = CpuCsrKernel()


@st.composite
def convolutions(draw, most=24):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))

    def pair(low, high):
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel, stride, padding, dilation = pair(1, 5), pair(1, 3), pair(0, 3), pair(1, 3)
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)
    ]
    size = tuple(draw(st.integers(low, low + most)) for low in least)
    channels = groups * draw(st.integers(1, 7)), groups * draw(st.integers(1, 11))
    return Convolution(*channels, size, kernel, stride, padding, dilation, groups)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=100)
@given(
    conv=convolutions(),
    images=st.integers(1, 4),
    density=st.sampled_from([0, 0.05, 0.3, 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_of_convolutions(level, conv, images, density, dtype, bias, seed):
    with at_level(level):
        compare_conv(KERNEL, conv_case(conv, images, density, dtype, bias, seed))


LARGE = {
    "rows in chunks": (Convolution(48, 40, (70, 50), (3, 3), (1, 1), (1, 1)), 2),
    "small images": (Convolution(16, 24, (4, 4), (3, 3), (1, 1), (1, 1)), 40),
    "strides": (Convolution(32, 20, (57, 61), (7, 5), (2, 3), (3, 2)), 3),
    "one tap": (Convolution(20, 30, (33, 29), (1, 1), (2, 2)), 3),
    "one dimension": (Convolution(12, 16, (1, 3000), (1, 9), (1, 2), (0, 4)), 2),
    "a kernel as large as its input": (Convolution(3, 5, (9, 300), (9, 300)), 2),
    "a narrow image": (Convolution(5, 6, (500, 1), (3, 1), (1, 1), (1, 0)), 2),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", LARGE)
def test_products_of_larger_convolutions_have_the_same_bits_for_every_number_of_threads(
    level, dtype, name
):
    products = []
    with at_level(level):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            products.append(compare_conv(KERNEL, conv_case(*LARGE[name], 1 / 16, dtype)))
    for other in products[1:]:
        assert all(torch.equal(a, b) for a, b in zip(products[0], other, strict=True))


def test_refuses_what_the_library_would_misread():
    case = conv_case(Convolution(4, 6, (9, 9), (3, 3)), 2)
    layout = KERNEL.layout(case.matrix)
    packed = KERNEL.pack_masked(case.matrix, layout)
    for conv, x, reason in (
        (case.conv, case.x.double(), "float64"),
        (case.conv, case.x[:, :, :8], "must be contiguous, of shape"),
        (case.conv, case.x.to(memory_format=torch.channels_last), "must be contiguous"),
        (case.conv._replace(kernel=(3, 2)), case.x, "is not one of the convolution"),
        (case.conv._replace(dilation=(5, 5)), case.x, "does not exist"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=reason):
            KERNEL.conv(packed, x, conv)
    with pytest.raises(ValueError, match="an operand of shape"):
        KERNEL.conv_sampled(layout, case.grad[:1], case.x, case.conv)
    with pytest.raises(ValueError, match="an operand of shape"):
        KERNEL.conv_input(packed, case.x, case.conv)
