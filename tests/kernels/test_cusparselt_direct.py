import gc
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.kernels import GemmKey, Router
from lightning_nm.kernels.api import Algorithm
from lightning_nm.kernels.gpu import cusparselt_plans
from lightning_nm.kernels.gpu.cusparselt_plans import Library
from lightning_nm.kernels.router.router import Product
from tests.support.fake_cusparselt import STREAM, DirectOnCpu, FakeCuSparseLt
from tests.support.trapping_cslt import KernelOnCpu, assert_product, normal, two_four

CPU = torch.device("cpu")
DEFAULT = Algorithm()
DTYPES = [torch.bfloat16, torch.float16]
KERNELS = DirectOnCpu(), KernelOnCpu()
PLAN = [
    "structured_descriptor_init",
    "dense_descriptor_init",
    "dense_descriptor_init",
    "matmul_descriptor_init",
    "matmul_alg_selection_init",
    "matmul_alg_set_attribute",
    "matmul_plan_init",
    "matmul_get_workspace",
]
UNMADE = [
    "matmul_plan_destroy",
    "matmul_alg_selection_destroy",
    "matmul_descriptor_destroy",
    "mat_descriptor_destroy",
    "mat_descriptor_destroy",
    "mat_descriptor_destroy",
]


@pytest.fixture
def fake():
    return FakeCuSparseLt()


@pytest.fixture
def library(fake):
    return Library(fake, capacity=3)


@pytest.fixture
def probed(fake):
    kernel = DirectOnCpu(fake)
    assert kernel.probe(CPU) == ""
    fake.calls.clear()
    return kernel


def multiply(library, tokens, bias=None, algorithm=DEFAULT, matrix=None):
    matrix = two_four(32, 64) if matrix is None else matrix
    x = normal(tokens, 64, dtype=matrix.dtype)
    packed = library.compress(matrix, STREAM)
    y = library.multiply(packed, x, bias, transposed=True, algorithm=algorithm, stream=STREAM)
    assert_product(y.t(), matrix, x.t(), bias)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_products(dtype, rows, depth, tokens, bias, seed):
    kernel, same = KERNELS
    matrix, x = (
        two_four(16 * rows, 16 * depth, dtype, seed),
        normal(tokens, 16 * depth, dtype=dtype, seed=seed + 1),
    )
    bias = normal(16 * rows, dtype=dtype, seed=seed + 2) if bias else None
    y = kernel.linear(kernel.pack(matrix), x, bias)
    assert y.is_contiguous()
    assert_product(y.t(), matrix, x.t(), bias)
    gradient, other = (
        two_four(16 * rows, 4 * tokens, dtype, seed),
        normal(4 * tokens, 24, dtype=dtype, seed=seed + 1),
    )
    assert_product(kernel.matmul(kernel.pack(gradient), other), gradient, other)
    assert torch.equal(kernel.pack(matrix), same.pack(matrix))


class TestCalls:
    def test_the_first_product_makes_a_plan_and_the_second_only_runs(self, probed, fake):
        matrix, x = two_four(32, 64), normal(16, 64)
        packed = probed.pack(matrix)
        assert fake.names() == [
            "structured_descriptor_init",
            "sp_mma_compressed_size2",
            "sp_mma_compress2",
        ]
        for product in (
            lambda: probed.linear(packed, x),
            lambda: probed.matmul(packed, normal(64, 24)),
        ):
            fake.calls.clear()
            product()
            assert fake.names() == [*PLAN, "matmul"]
            fake.calls.clear()
            product()
            assert fake.names() == ["matmul"]
        fake.calls.clear()
        probed.pack(matrix)
        assert fake.names() == ["sp_mma_compress2"]

    def test_sizes_orders_and_addresses_of_a_forward(self, probed, fake):
        packed, x = probed.pack(two_four(32, 64)), normal(16, 64)
        fake.calls.clear()
        y = probed.linear(packed, x)
        (_, a), (_, b), (_, c), (_, product) = fake.calls[:4]
        assert (a["rows"], a["cols"], a["ld"], a["alignment"], a["value_type"], a["order"]) == (
            32,
            64,
            64,
            16,
            14,
            2,
        )
        assert (b["rows"], b["cols"], b["ld"], b["alignment"], b["value_type"], b["order"]) == (
            16,
            64,
            64,
            16,
            14,
            2,
        )
        assert (c["rows"], c["cols"], c["ld"], c["alignment"], c["value_type"], c["order"]) == (
            32,
            16,
            32,
            16,
            14,
            1,
        )
        assert (product["op_a"], product["op_b"]) == (0, 1)
        call = fake.calls[-1][1]
        assert [call["d_a"], call["d_b"], call["d_d"]] == [
            packed.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
        ]

    def test_sizes_orders_and_addresses_of_a_wgrad(self, probed, fake):
        packed, other = (
            probed.pack(two_four(32, 64, torch.float16)),
            normal(64, 24, dtype=torch.float16),
        )
        fake.calls.clear()
        result = probed.matmul(packed, other)
        (_, a), (_, b), (_, c), (_, product) = fake.calls[:4]
        assert (a["rows"], a["cols"], a["ld"], a["value_type"], a["order"]) == (32, 64, 64, 2, 2)
        assert (b["rows"], b["cols"], b["ld"], b["value_type"], b["order"]) == (64, 24, 24, 2, 2)
        assert (c["rows"], c["cols"], c["ld"], c["value_type"], c["order"]) == (32, 24, 24, 2, 2)
        assert (product["op_a"], product["op_b"]) == (0, 0)
        call = fake.calls[-1][1]
        assert [call["d_a"], call["d_b"], call["d_d"]] == [
            packed.data_ptr(),
            other.data_ptr(),
            result.data_ptr(),
        ]

    def test_each_call_has_its_own_bias(self, probed, fake):
        packed, x, biases = probed.pack(two_four(32, 64)), normal(16, 64), normal(3, 32)
        for bias in biases:
            fake.calls.clear()
            assert_product(probed.linear(packed, x, bias).t(), two_four(32, 64), x.t(), bias)
        assert fake.names() == ["matmul_desc_set_attribute", "matmul"]
        fake.calls.clear()
        assert_product(probed.linear(packed, x).t(), two_four(32, 64), x.t())
        assert fake.names() == [*PLAN, "matmul"]

    def test_each_algorithm_has_its_own_plan(self, fake):
        first, second = DirectOnCpu(fake), DirectOnCpu(fake, algorithm=7)
        matrix, x = two_four(32, 64), normal(16, 64)
        first.linear(first.pack(matrix), x)
        packed = second.pack(matrix)
        fake.calls.clear()
        second.linear(packed, x)
        assert fake.names() == [*PLAN, "matmul"]
        selection = max(pointer for pointer, made in fake.alive.items() if made.kind == "selection")
        assert fake.alive[selection].attributes == {0: 7}

    def test_no_workspace_is_no_pointer(self):
        fake = FakeCuSparseLt(workspace=0)
        assert DirectOnCpu(fake).probe(CPU) == ""
        assert {call["workspace"] for name, call in fake.calls if name == "matmul"} == {0}


class TestPlans:
    def test_the_one_that_is_unused_for_longest_goes(self, library, fake):
        multiply(library, 8)  # a way to pack, and a plan
        multiply(library, 16)
        fake.calls.clear()
        multiply(library, 8)
        assert fake.names() == ["sp_mma_compress2", "matmul"]
        multiply(library, 24)  # in the place of 16
        assert fake.names()[-1 - len(UNMADE) : -1] == UNMADE
        fake.calls.clear()
        multiply(library, 8)
        assert fake.names() == ["sp_mma_compress2", "matmul"]
        multiply(library, 16)
        assert "matmul_plan_init" in fake.names()

    @pytest.mark.slow
    @settings(deadline=None, max_examples=15)
    @given(
        st.lists(
            st.tuples(st.sampled_from([8, 16, 24, 32]), st.booleans(), st.sampled_from(DTYPES)),
            max_size=8,
        )
    )
    def test_no_more_than_its_capacity_is_kept_and_nothing_is_lost(self, uses):
        fake = FakeCuSparseLt()
        library = Library(fake, capacity=3)
        for tokens, bias, dtype in uses:
            multiply(
                library,
                tokens,
                normal(32, dtype=dtype) if bias else None,
                matrix=two_four(32, 64, dtype),
            )
            kinds = [made.kind for made in fake.alive.values()]
            assert kinds.count("plan") == kinds.count("selection") == kinds.count("matmul") <= 3
            assert kinds.count("sparse") <= 3
        del library
        gc.collect()
        assert fake.alive == {}

    @pytest.mark.parametrize("step", [*PLAN, "matmul_desc_set_attribute"])
    def test_what_was_made_before_an_error_is_destroyed(self, library, fake, step):
        packed = library.compress(two_four(32, 64), STREAM)
        before = set(fake.alive)
        fake.broken = {step}
        with pytest.raises(Exception, match="NOT_SUPPORTED"):
            library.multiply(
                packed,
                normal(8, 64),
                normal(32),
                transposed=True,
                algorithm=Algorithm(),
                stream=STREAM,
            )
        assert set(fake.alive) == before
        fake.broken = set()
        multiply(library, 8, normal(32))

    def test_an_unknown_size_leaves_nothing_behind(self, library, fake):
        fake.broken = {"sp_mma_compressed_size2"}
        with pytest.raises(Exception, match="NOT_SUPPORTED"):
            library.compress(two_four(32, 64), STREAM)
        assert [made.kind for made in fake.alive.values()] == ["handle"]

    def test_a_kernel_keeps_so_many(self, fake, monkeypatch):
        monkeypatch.setattr(Library.__init__, "__defaults__", (2,))
        kernel = DirectOnCpu(fake)
        for tokens in range(8, 80, 8):
            kernel.linear(kernel.pack(two_four(32, 64)), normal(tokens, 64))
        assert [made.kind for made in fake.alive.values()].count("plan") <= 2
        assert cusparselt_plans.CAPACITY >= 100

    def test_each_thread_has_its_own_and_takes_them_along(self, probed, fake):
        matrix, x = two_four(32, 64), normal(16, 64)
        packed = probed.pack(matrix)
        probed.linear(packed, x)
        here = set(fake.alive)
        results, there = [], set()

        def backward():
            results.append(probed.linear(packed, x))
            there.update(set(fake.alive) - here)

        fake.calls.clear()
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert_product(results[0].t(), matrix, x.t())
        assert fake.names()[:4] == ["init", *["get_property"] * 3]
        gc.collect()
        assert there
        assert not there & set(fake.alive)
        assert here <= set(fake.alive)

    @pytest.mark.slow
    def test_nothing_is_destroyed_at_exit(self):
        code = """
from tests.support.fake_cusparselt import *
from tests.support.trapping_cslt import normal, two_four
class Loud(FakeCuSparseLt):
    def destroy(self, handle_ptr):
        print("destroyed")
library = Loud()
kernel = DirectOnCpu(library)
kernel.linear(kernel.pack(two_four(32, 64)), normal(16, 64))
library.names = print
print("plans", sum(made.kind == "plan" for made in library.alive.values()))
"""
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        lines = run.stdout.split("\n")
        assert (
            lines.index("plans 1") == len(lines) - 2
        )  # the probe's thread destroys its own before


class TestAlgorithms:
    """The library's search returns an id, a split of the contraction, and its mode: all three are in the plan."""

    FOUND = Algorithm(5, 3, 4)

    @pytest.fixture
    def kernel(self):
        return DirectOnCpu(FakeCuSparseLt(fastest=self.FOUND))

    @pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
    def test_the_search_is_of_this_product_and_leaves_nothing_behind(self, kernel, gemm):
        packed = kernel.pack(two_four(32, 64))
        dense = normal(64, 24) if gemm == "wgrad" else normal(24, 64)
        before = set(kernel.library.alive)
        kernel.library.calls.clear()
        assert list(kernel.algorithms(gemm, packed, dense)) == [self.FOUND]
        assert kernel.library.names() == [
            *PLAN,
            "matmul_search",
            *["matmul_alg_get_attribute"] * 3,
            *UNMADE,
        ]
        assert kernel.library.calls[3][1]["op_b"] == (gemm != "wgrad")
        assert set(kernel.library.alive) == before

    @pytest.mark.parametrize("found", [Algorithm(), Algorithm(0, 1, 0)])
    def test_the_default_is_no_proposal(self, found):
        kernel = DirectOnCpu(FakeCuSparseLt(fastest=found))
        assert kernel.algorithms("forward", kernel.pack(two_four(32, 64)), normal(24, 64)) == ()

    def test_a_given_algorithm_is_not_searched_for(self, kernel):
        given = DirectOnCpu(kernel.library, algorithm=7)
        packed = given.pack(two_four(32, 64))
        assert given.algorithms("forward", packed, normal(24, 64)) == ()
        assert "matmul_search" not in kernel.library.names()

    def test_a_search_that_fails_leaves_nothing_behind(self, kernel):
        packed = kernel.pack(two_four(32, 64))
        before = set(kernel.library.alive)
        kernel.library.broken = {"matmul_search"}
        with pytest.raises(Exception, match="NOT_SUPPORTED"):
            kernel.algorithms("forward", packed, normal(24, 64))
        assert set(kernel.library.alive) == before

    @pytest.mark.parametrize(
        ("algorithm", "attributes"),
        [
            (Algorithm(), {0: 0}),
            (Algorithm(2, 1, 0), {0: 2}),
            (FOUND, {0: 5, 3: 3, 4: 4}),
            (Algorithm(5, -1), {0: 5, 3: -1}),
        ],
    )
    def test_an_algorithm_has_its_own_plan_with_what_differs_from_the_default(
        self, kernel, algorithm, attributes
    ):
        matrix, x, library = two_four(32, 64), normal(24, 64), kernel.library
        packed = kernel.pack(matrix)
        other = kernel.with_algorithm(algorithm)
        assert (other.name, other.device_probe) == (kernel.name, kernel.device_probe)
        assert_product(other.linear(packed, x).t(), matrix, x.t())
        selection = max(
            pointer for pointer, made in library.alive.items() if made.kind == "selection"
        )
        assert library.alive[selection].attributes == attributes
        assert library.alive[selection].at_plan == attributes, "the plan is made with them"
        assert kernel.algorithm == Algorithm()

    def test_auto_takes_it_into_the_decision_and_the_products(self, kernel):
        """Of three plans, the one that was searched is the fastest, and it alone runs."""

        class Timer:
            def time(self, function, device):
                kernel.library.calls.clear()
                function()
                used = [
                    kernel.library.alive[call["plan"]].selection
                    for name, call in kernel.library.calls
                    if name == "matmul"
                ]
                if not kernel.library.calls:
                    return 9e-3
                return (
                    1e-3 if used and kernel.library.alive[used[0]].attributes.get(0) == 5 else 2e-3
                )

        router = Router("auto", [kernel], timer=Timer())
        key = GemmKey("forward", 32, 64, 24, torch.bfloat16, NMPattern(2, 4), "cpu")
        decision = router.initialize(CPU).decide(key)
        assert (decision.kernel, decision.algorithm) == ("cusparselt-direct", self.FOUND)
        router.tuned = True
        assert router.kernel(Product("layer", key)).algorithm == self.FOUND

    @pytest.mark.parametrize("wrong", [20, 21])
    def test_a_proposal_that_is_wrong_loses(self, wrong):
        """One is wrong in each product, the other one with a bias alone."""
        kernel = DirectOnCpu(FakeCuSparseLt(fastest=Algorithm(wrong, 2, 5)))

        class Timer:
            def time(self, function, device):
                kernel.library.calls.clear()
                function()
                return 1e-3 if kernel.library.calls else 9e-3

        router = Router("auto", [kernel], timer=Timer())
        key = GemmKey("forward", 32, 64, 24, torch.bfloat16, NMPattern(2, 4), "cpu")
        decision = router.initialize(CPU).decide(key)
        assert (decision.kernel, decision.algorithm) == ("cusparselt-direct", None)
        assert f"(algorithm {wrong}, split-k 2, mode 5): wrong by" in decision.reason
