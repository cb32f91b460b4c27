"""Paths of modules before 0.3 are told by the error that names the new ones."""

import importlib

import pytest

from lightning_nm import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_the_error_names_a_module_that_exists(old):
    with pytest.raises(ModuleNotFoundError, match=rf"{old} is {MOVED[old]} since"):
        importlib.import_module(old)
    importlib.import_module(MOVED[old])


def test_other_names_are_not_found_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'lightning_nm\.nothing'"):
        importlib.import_module("lightning_nm.nothing")
