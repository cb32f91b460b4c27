"""What a later study file may change under the same output folder."""

from dataclasses import replace

import pytest

from lightning_nm.commands.study.settings import forbidden_changes, to_settings
from lightning_nm.commands.study.spec import Spec

SPEC = Spec(
    "s",
    {"trainer": {"max_steps": 3}},
    "m",
    {"a": {}, "b": {"method": "sr-ste"}},
    baselines=("a",),
    grid={"pattern": ["2:4"]},
    seeds=(0, 1),
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"variants": {**SPEC.variants, "c": {"method": "ste"}}},
        {"seeds": (0, 1, 2)},
        {"grid": {"pattern": ["2:4", "1:16"]}},
        {"baselines": ()},
    ],
)
def test_additions_are_allowed(changes):
    assert forbidden_changes(to_settings(SPEC), to_settings(replace(SPEC, **changes))) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"config": {"trainer": {"max_steps": 4}}}, "config.trainer.max_steps: was 3, is 4"),
        ({"overrides": {"trainer.devices": 2}}, "overrides.trainer.devices: was None, is 2"),
        ({"metric": "n"}, "metric: was 'm', is 'n'"),
        ({"direction": "maximize"}, "direction: was 'minimize', is 'maximize'"),
        (
            {"variants": {"a": {}, "b": {"method": "ste"}}},
            "variants.b: was {'method': 'sr-ste'}, is {'method': 'ste'}",
        ),
        ({"variants": {"a": {}}}, "variants.b: was removed"),
        ({"seeds": (0,)}, "seeds: 1 was removed"),
        ({"grid": {"pattern": ["1:16"]}}, "grid.pattern: '2:4' was removed"),
        ({"grid": {}}, "grid: had the keys ['pattern'], has []"),
    ],
)
def test_other_changes_are_named(changes, fault):
    assert fault in forbidden_changes(to_settings(SPEC), to_settings(replace(SPEC, **changes)))
