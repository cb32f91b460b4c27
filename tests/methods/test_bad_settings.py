"""Settings of a wrong type are refused by their name and value, when the method is made."""

import pytest

from lightning_nm import CAST, STEP, DecayingMask, MaskLogits, MaxQ, RigL, SLoPe

WRONG = {
    "cast-decay": (lambda: CAST(decay="x"), r"decay='x' must be a number, not str"),
    "cast-every": (lambda: CAST(refresh_every=2.5), r"refresh_every=2\.5 must be an integer"),
    "rigl-drop": (lambda: RigL(drop="x"), r"drop='x' must be a number, not str"),
    "rigl-every": (lambda: RigL(every=True), r"every=True must be an integer of at least 1"),
    "slope-every": (lambda: SLoPe(refresh_every=2.5), r"refresh_every=2\.5 must be an integer"),
    "slope-first": (lambda: SLoPe(first_refresh=0), r"first_refresh=0 must be an integer of at"),
    "step-threshold": (lambda: STEP(threshold="x"), r"threshold='x' must be a number, not str"),
    "decaying-rate": (lambda: DecayingMask(rate=True), r"rate=True must be a number, not bool"),
    "maxq-temperature": (lambda: MaxQ(temperature="x"), r"temperature='x' must be a number"),
    "maxq-start": (lambda: MaxQ(start=0.5), r"stop=0\.25 lies before start=0\.5: give a later"),
    "logits-pair": (lambda: MaskLogits(temperature=3), r"temperature=3 must be two positive"),
    "logits-text": (lambda: MaskLogits(scale=(4, "x")), r"scale=\(4, 'x'\) must be two positive"),
    "logits-prior": (lambda: MaskLogits(prior="x.pt"), r"prior='x\.pt' must be the state dict"),
    "logits-strength": (lambda: MaskLogits(prior_strength="x"), r"prior_strength='x' must be a"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_a_setting_of_a_wrong_type_is_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
