from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.kernels import cost
from tests.fake_kernels import gemm_key

H200 = cost.device_model("H200")
VIT = 256 * 197


def layer(size_in, size_out, tokens):
    return (
        gemm_key("forward", size_out, size_in, tokens),
        gemm_key("dgrad", size_in, size_out, tokens),
        gemm_key("wgrad", size_out, tokens, size_in),
    )


ROOFLINE = [
    # in, out, tokens, dense ms, us of both weights and of dY unfused/fused, then for each gain the speed-up of a layer
    # with all three GEMMs sparse unfused/fused, and for the first two gains with forward and dgrad alone
    (4096, 11008, 8192, 0.94, (149, 45), (149, 66), (1.06, 1.15, 1.06, 1.11), (1.18, 1.28, 1.14, 1.19), (1.37, 1.51)),
    (4096, 11008, 16384, 1.87, (149, 45), (299, 131), (1.10, 1.16, 1.09, 1.12), (1.22, 1.30, 1.17, 1.20), (1.42, 1.52)),
    (4096, 11008, 32768, 3.74, (149, 45), (598, 262), (1.11, 1.16, 1.11, 1.12), (1.24, 1.30, 1.19, 1.20), (1.45, 1.53)),
    (11008, 4096, 8192, 0.94, (149, 45), (56, 24), (1.10, 1.17, 1.06, 1.11), (1.23, 1.31, 1.14, 1.19), (1.43, 1.54)),
    (11008, 4096, 16384, 1.87, (149, 45), (111, 49), (1.14, 1.18, 1.09, 1.12), (1.27, 1.32, 1.17, 1.20), (1.49, 1.56)),
    (11008, 4096, 32768, 3.74, (149, 45), (222, 98), (1.15, 1.18, 1.11, 1.12), (1.29, 1.33, 1.19, 1.20), (1.52, 1.57)),
    (
        1024,
        4096,
        VIT,
        0.54,
        (14, 4),
        (342, 150),
        (0.95, 1.08, 1.11, 1.12),
        (1.04, 1.20, 1.20, 1.21),
        (1.18, 1.39),
    ),
    (4096, 1024, VIT, 0.54, (14, 4), (86, 38), (1.12, 1.16, 1.11, 1.12), (1.25, 1.30, 1.20, 1.21), (1.46, 1.54)),
]


@pytest.mark.parametrize("row", ROOFLINE, ids=lambda row: "x".join(str(size) for size in row[:3]))
def test_the_roofline_of_an_h200(row):
    size_in, size_out, tokens, dense, weights, gradient, *gains = row
    forward, dgrad, wgrad = layer(size_in, size_out, tokens)
    assert round(cost.dense_ms(forward, H200), 2) == dense
    for index, (pair, single) in enumerate([(cost.UNFUSED, cost.UNFUSED), (cost.FUSED_PAIR, cost.FUSED)]):
        both = cost.pack_ms(forward, H200, pair) + cost.pack_ms(dgrad, H200, pair)
        own = cost.pack_ms(wgrad, H200, single)
        assert (round(1e3 * both), round(1e3 * own)) == (weights[index], gradient[index])
        for gain, expected in zip((1.2, 1.35, 1.6), gains, strict=True):
            model = replace(H200, gain=gain)
            times = [(cost.dense_ms(key, model), cost.sparse_ms(key, model)) for key in (forward, dgrad, wgrad)]
            all_dense, all_sparse = (sum(column) for column in zip(*times, strict=True))
            assert round(all_dense / (all_sparse + both + own), 2) == expected[index]
            if gain < 1.6:
                wgrad_dense = all_sparse - times[2][1] + times[2][0]
                assert round(all_dense / (wgrad_dense + both), 2) == expected[2 + index]


@pytest.mark.parametrize(
    ("traffic", "uses"),
    [
        (cost.UNFUSED, [7200, 5018, 3927, 2836, 2291, 1964, 1745]),
        (cost.FUSED, [3158, 2201, 1722, 1244, 1005, 861, 766]),
        (cost.FUSED_PAIR, [2147, 1497, 1171, 846, 683, 586, 521]),
    ],
)
def test_the_break_even_of_an_h200(traffic, uses):
    gains = (1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.6)
    assert [round(cost.break_even(replace(H200, gain=gain), traffic)) for gain in gains] == uses


@given(
    gain=st.floats(1.05, 1.9),
    traffic=st.sampled_from([cost.UNFUSED, cost.FUSED, cost.FUSED_PAIR]),
    share=st.sampled_from([0.99, 1.01]),
)
def test_break_even_is_where_the_roofline_crosses(gain, traffic, share):
    model = replace(H200, gain=gain)
    columns = round(share * cost.break_even(model, traffic))
    key = gemm_key(rows=1 << 18, depth=1 << 18, columns=columns)  # bound by arithmetic
    times = cost.dense_ms(key, model), cost.sparse_ms(key, model), cost.pack_ms(key, model, traffic)
    assert (cost.speedup(*times, reuse=1) > 1) == (share > 1)


def test_a_shared_pack_costs_its_share():
    assert cost.speedup(6, 4, 8, reuse=1) == 0.5
    assert cost.speedup(6, 4, 8, reuse=8) == 1.2


def test_products_bound_by_memory_gain_what_is_not_read():
    key = gemm_key(rows=8192, depth=8192, columns=8)
    read = 2 * 8192 * 8192 + 2 * (8192 + 8192) * 8
    assert cost.dense_ms(key, H200) == pytest.approx(read / 4.3e12 * 1e3)
    assert cost.sparse_ms(key, H200) == pytest.approx((read - 0.875 * 8192 * 8192) / 4.3e12 * 1e3)


def test_sparse_products_that_gain_nothing_never_pay():
    assert cost.break_even(replace(H200, gain=1.0)) == float("inf")
    assert cost.break_even(replace(H200, gain=0.62)) == float("inf")


def test_only_gpus_with_known_figures():
    assert all(model.source and model.name == name for name, model in cost.DEVICE_MODELS.items())
    assert cost.device_model("H200") is cost.device_model("NVIDIA H200")
    with pytest.raises(ValueError, match=r"'NVIDIA H200 NVL'.*only for H200"):
        cost.device_model("NVIDIA H200 NVL")


@pytest.mark.parametrize("figure", [0, -1, float("nan"), float("inf")])
def test_figures_are_positive(figure):
    with pytest.raises(ValueError, match=r"bandwidth=.* of 'mine' is not a positive number"):
        cost.DeviceModel("mine", 100, figure, 1.2)


@pytest.mark.parametrize("function", [cost.dense_ms, cost.sparse_ms, cost.pack_ms])
def test_figures_are_for_16_bits(function):
    with pytest.raises(ValueError, match=r"not for torch\.float32"):
        function(gemm_key(dtype=torch.float32), H200)
