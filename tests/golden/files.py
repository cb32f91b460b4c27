"""Traces in files: masks bit by bit, other tensors by a few sums over their entries with fixed signs.

``python -m tests.golden.files`` writes them again from the formulas of ``tests/golden/oracle.py``.
"""

from pathlib import Path

import numpy as np

from tests.golden.oracle import CASES, train, values

FOLDER = Path(__file__).parent
SUMS = 4


def sums(array):
    """Sums of an array's entries with fixed signs: a change of any entry changes them."""
    flat = np.asarray(array, dtype=np.float64).ravel()
    signs = np.sign(np.stack([values(flat.shape, 300 + k) for k in range(SUMS)]))
    return signs @ flat


def arrays(trace):
    """What a file holds of a trace: for each kind an array whose first axes are the step and the layer."""
    found = {}
    for name in ("forward", "backward"):
        bits = [np.concatenate([mask.ravel() for mask in masks]) for masks in getattr(trace, name)]
        found[name] = np.packbits(np.stack(bits), axis=1)
    for name in ("dx", "dw", "weights"):
        found[name] = np.stack(
            [[sums(array) for array in layers] for layers in getattr(trace, name)]
        )
    return found | {"last": np.concatenate([w.ravel() for w in trace.weights[-1]])}


def load(name):
    """The committed arrays of a case."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def main():
    """Write every file."""
    for name, case in CASES.items():
        trace = train(case)
        np.savez(FOLDER / f"{name}.npz", **arrays(trace))
        print(
            f"{name}: {(FOLDER / f'{name}.npz').stat().st_size / 1024:.1f} kB, margin {trace.margin:.1e}"
        )


if __name__ == "__main__":
    main()
