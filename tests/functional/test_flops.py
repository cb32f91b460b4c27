import pytest

from lightning_nm.functional.flop_counting import GemmDensity, train_flops, train_flops_ratio


def test_dense_is_three_forwards():
    assert train_flops(7, GemmDensity()) == 21
    assert train_flops_ratio([(7, GemmDensity()), (2, GemmDensity(1, 1, 1))]) == 1


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (lambda r: GemmDensity(r, 1, 1), (0.833, 0.750, 0.688)),  # STE, SR-STE
        (lambda r: GemmDensity(r, r, 1), (0.667, 0.500, 0.375)),  # transposable, Bi-Mask
        (lambda r: GemmDensity(r, r, r), (0.500, 0.250, 0.0625)),  # all three
    ],
)
def test_the_accounting_of_the_papers(density, expected):
    ratios = [train_flops_ratio([(1.0, density(r))]) for r in (2 / 4, 1 / 4, 1 / 16)]
    assert ratios == pytest.approx(expected, abs=6e-4)


def test_layers_weigh_by_their_flops():
    layers = [(300.0, GemmDensity(0.5, 0.5, 0.5)), (100.0, GemmDensity()), (0.0, GemmDensity())]
    assert train_flops_ratio(iter(layers)) == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda density=density: GemmDensity(wgrad=density), r"wgrad=.*from 0 to 1")
            for density in (-0.1, 1.1, float("nan"))
        ),
        *(
            (lambda flops=flops: train_flops(flops, GemmDensity()), "dense_forward=")
            for flops in (-1, float("nan"), float("inf"))
        ),
        (lambda: train_flops_ratio([]), "no multiply-adds"),
        (lambda: train_flops_ratio([(0, GemmDensity())]), "no multiply-adds"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
