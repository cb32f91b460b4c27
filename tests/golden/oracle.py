"""The papers' training steps, restated in numpy: formulas and explicit sums, and nothing of the package.

A network has convolutions of kernel (1, taps), each followed by tanh, then the mean over positions and a linear head.
A linear layer is a convolution of one tap. Weights are ``[out, in, taps]``, values ``[batch, channels, positions]``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

N, M = 2, 4
PATTERNS = np.array([p for p in itertools.product((1, 0), repeat=M) if sum(p) == N])
"""The 6 patterns of a block, ``[C, M]``."""
TILES = [
    PATTERNS[list(rows)]
    for rows in itertools.product(reversed(range(len(PATTERNS))), repeat=M)
    if (PATTERNS[list(rows)].sum(0) == N).all()
]
"""The 90 transposable 2:4 masks of a tile."""


def values(shape, seed, scale=1.0):
    """Numbers without a pattern that are the same everywhere."""
    count = int(np.prod(shape))
    return (scale * np.sin(12.9898 * np.arange(1, count + 1) + 78.233 * (seed + 1))).reshape(shape)


def candidates(rows, count, search):
    """The random permutations of the rows that a search is given."""
    return np.stack([np.argsort(values((rows,), 1000 * search + k)) for k in range(count)])


CONVOLUTIONS = ((4, 4, 2), (8, 4, 2), (4, 8, 2))
LINEAR = ((8, 8, 1), (8, 8, 1))
MIDDLE = (False, True, True, False)
"""Stem and head dense."""
FIRST, LAST = range(1, 11), range(96, 106)


@dataclass
class Case:
    """A method and its setting, as the paper's code has it; forward passes and steps are counted from 1."""

    method: str
    sizes: tuple[tuple[int, int, int], ...] = CONVOLUTIONS  # (out, in, taps), or linear layers
    masked: tuple[bool, ...] | None = None  # of these and of the head, which alone is dense
    steps: int = 20
    recorded: tuple[int, ...] = tuple(range(1, 21))
    flat: bool = False
    decay: float = 0.0
    refresh: tuple[int, ...] = ()  # passes before which a transposable mask is selected
    searches: tuple[int, ...] = ()  # the same of permutation searches
    candidates: int = 0
    dense_from: int = 10**9  # the pass from which training is dense
    adamw: bool = False
    threshold: float = 0.0  # of STEP's switch
    sparse_from: tuple[int, ...] = ()  # the earliest and the latest pass of STEP's masks
    fades_until: int = 0  # the pass from which a decaying mask is hard
    wide_until: int = 0  # the pass from which blocks keep N entries instead of M - 1
    updates: tuple[int, ...] = ()  # passes whose gradients move RigL's masks
    drop: float = 0.0  # the fraction that RigL drops at first
    groups: int = 0  # CAST's numbers of the scale for each row
    end: int = 0  # the last step of a schedule
    stop: int = 0  # the steps after which a mask that shrinks is N:M

    def __post_init__(self):
        self.masked = self.masked or (*[True] * len(self.sizes), False)


CASES = {
    # arXiv 2102.04010: blocks along the input channels of a tap, stem sparse, head dense, decay in the gradient
    "sr-ste": Case("sr-ste", decay=2e-4),
    # arXiv 2302.06058: flat blocks, stem and head dense, the identity until the 100th forward pass
    "bi-mask": Case(
        "bi-mask",
        masked=MIDDLE,
        steps=105,
        recorded=(*FIRST, *LAST),
        flat=True,
        decay=2e-4,
        searches=(100,),
        candidates=100,
    ),
    # arXiv 2104.08378: pruned once before training
    "asp": Case("asp", masked=(True,) * 4),
    # arXiv 2102.08124: flat, stem sparse, head dense, no decay, a new mask before the 40th forward pass
    "transposable": Case(
        "transposable", steps=45, recorded=(*FIRST, *range(36, 46)), flat=True, refresh=(1, 40)
    ),
    # arXiv 2206.06662: stem and head dense, scores trained as weights are, N:M after half of the training
    "lbc": Case("lbc", masked=MIDDLE, stop=10),
    # arXiv 2312.07061: stem and head dense, blocks pruned over the first quarter, soft masks, decay in the gradient
    "maxq": Case("maxq", masked=MIDDLE, decay=2e-4, stop=5),
    # arXiv 2409.17481: weights of masked layers frozen, head dense, annealed until the end, the prior by magnitude
    "mask-logits": Case("mask-logits", LINEAR, stop=20),
    # arXiv 2404.01847: a new mask after 40 steps, decay after clipping, the last sixth dense
    "fst": Case(
        "transposable",
        LINEAR,
        steps=60,
        recorded=(*range(1, 9), *range(38, 44), *range(48, 54)),
        decay=6e-5,
        refresh=(1, 41),
        dense_from=51,
        adamw=True,
    ),
    # arXiv 2409.09099: the soft threshold with a factor from the first weights, no decay; without its noisy gradients
    "s-ste": Case("s-ste", LINEAR, adamw=True),
    # arXiv 2302.01172: dense until the second moment settles, within 10 % and 50 % of the steps; then it is frozen
    "step": Case("step", LINEAR, adamw=True, threshold=5.5e-7, sparse_from=(3, 11)),
    # arXiv 2209.07617: pruned entries fade linearly over half of the training
    "decaying": Case("decaying", masked=MIDDLE, fades_until=11),
    # arXiv 2402.04744: 3:4 for half of the training, then 2:4
    "decaying-structure": Case("decaying", masked=MIDDLE, wide_until=11),
    # arXiv 2405.16325: rows pruned once, columns before the first forward pass and the 100th
    "slope": Case(
        "slope", LINEAR, steps=105, recorded=(*FIRST, *LAST), refresh=(1, 100), adamw=True
    ),
    # arXiv 1911.11134 in blocks: every 4 steps until step 18, by a cosine from a half
    "rigl": Case("rigl", updates=(5, 9, 13, 17), drop=0.5, end=18),
    # arXiv 2509.25996, algorithm 1: decayed entries again after every 3 steps, N:M after 17
    "cast": Case(
        "cast",
        LINEAR,
        decay=0.01,
        refresh=(1, 4, 7, 10, 13, 16),
        adamw=True,
        groups=2,
        end=17,
    ),
}
NO_LATENT_WEIGHTS = ("asp", "slope", "rigl")


def start(case):
    """The first weights, the head's weight and its bias last."""
    shapes = [*case.sizes, (4, case.sizes[-1][0])]
    weights = [values(shape, k, (3 / np.prod(shape[1:])) ** 0.5) for k, shape in enumerate(shapes)]
    return [*weights, values((4,), 50, 0.1)]


def batch(case, step):
    """Inputs and targets of a step."""
    channels, positions = case.sizes[0][1], 1 + sum(taps - 1 for _, _, taps in case.sizes) + 1
    return values((6, channels, positions), 100 + step), values((6, 4), 5000 + step)


@dataclass
class Trace:
    """What a training did at the recorded steps: lists of one array for each masked layer."""

    forward: list = field(default_factory=list)  # bool masks
    backward: list = field(default_factory=list)
    dx: list = field(default_factory=list)  # of the layers' inputs, but of the first one's
    dw: list = field(default_factory=list)  # of the weights, as the optimizer gets them
    weights: list = field(default_factory=list)  # after the step
    margin: float = np.inf  # the smallest relative distance from another choice of a mask


def train(case):
    """The trace of a case."""
    trainers = {
        "lbc": train_lbc,
        "maxq": train_maxq,
        "mask-logits": train_mask_logits,
        "cast": train_cast,
    }
    trace, masked = Trace(), [k for k, use in enumerate(case.masked) if use]
    trainers.get(case.method, train_masks)(case, start(case), masked, trace)
    return trace


def train_masks(case, weights, masked, trace):
    """A method that selects masks from weights, or keeps them."""
    masks, permutations, scales, state = {}, {}, {}, {}
    for step in range(1, case.steps + 1):
        for k in masked:
            dense = step >= case.dense_from or (case.threshold and "frozen" not in state)
            if dense:
                masks[k] = np.ones_like(weights[k]), np.ones_like(weights[k])
            else:
                masks[k] = select(case, k, weights[k], masks.get(k), permutations, step, trace)
        forward = [w * masks[k][0] if k in masks else w for k, w in enumerate(weights)]
        backward = [w * masks[k][1] if k in masks else w for k, w in enumerate(weights)]
        for k in masked:
            if case.method == "s-ste":
                forward[k] = backward[k] = soft_threshold(weights[k], k, scales)
            if step < case.fades_until:
                kept = from_matrix(
                    case, largest(np.abs(as_matrix(case, weights[k])), trace), weights[k].shape
                )
                left = 1 - (step - 1) / (case.fades_until - 1)
                forward[k] = backward[k] = weights[k] * (kept + (1 - kept) * left)
        gradients, inputs = differentiate(case, forward, backward, *batch(case, step))
        if case.adamw and case.method not in NO_LATENT_WEIGHTS:
            clip(gradients)
        moved = {}
        for k in masked:
            pruned = 1 - masks[k][0]
            if step in case.updates:
                moved[k] = drop_and_grow(case, weights[k], gradients[k], masks[k][0], step, trace)
            if case.method in NO_LATENT_WEIGHTS:
                gradients[k] = gradients[k] * masks[k][0]
            gradients[k] = gradients[k] + case.decay * pruned * weights[k]
        if case.adamw and case.method in NO_LATENT_WEIGHTS:
            clip(gradients)  # of kept entries alone
        weights = (adamw if case.adamw else sgd)(weights, gradients, state)
        if case.threshold:
            freeze_if_settled(case, masked, state)
        if case.method in NO_LATENT_WEIGHTS:
            weights = [w * masks[k][0] if k in masks else w for k, w in enumerate(weights)]
        for k, mask in moved.items():
            # An exchanged entry starts at zero, its momentum too, and what leaves has no gradient.
            both = mask * masks[k][0]
            weights[k], state["momentum"][k] = weights[k] * both, state["momentum"][k] * both
            gradients[k] = gradients[k] * both
        record(case, step, trace, masked, masks, inputs, gradients, weights)
        masks.update({k: (mask, mask) for k, mask in moved.items()})


def drop_and_grow(case, weight, gradient, mask, step, trace):
    """RigL's next mask: the smallest kept entries go, and each block regains as many by the gradient."""

    def blocks(array):
        return np.moveaxis(array, 1, -1).reshape(-1, M)

    share = case.drop / 2 * (1 + np.cos(np.pi * (step - 1) / case.end))
    kept = blocks(mask).astype(bool)
    size = np.where(kept, np.abs(blocks(weight)), np.inf)
    count = int(share * kept.sum())
    if not count:
        return mask
    order = np.sort(size.ravel())
    trace.margin = min(trace.margin, (order[count] - order[count - 1]) / order[count])
    survives = kept & (size >= order[count])
    new = survives.copy()
    for b, block in enumerate(np.abs(blocks(gradient))):
        free = sorted((k for k in range(M) if not survives[b, k]), key=lambda k, g=block: -g[k])
        lost = kept[b].sum() - survives[b].sum()
        new[b, free[:lost]] = True
        if lost:
            gap = block[free[lost - 1]] - block[free[lost]] if lost < len(free) else np.inf
            trace.margin = min(trace.margin, gap / block.max())
    out, depth, taps = weight.shape
    return np.moveaxis(new.reshape(out, taps, depth), -1, 1).astype(float)


def train_cast(case, weights, masked, trace):
    """CAST: a scale of every masked weight, AdamS, and one projection."""
    scales = {k: np.ones((len(weights[k]), case.groups)) for k in masked}
    kept, masks, moments, state = {}, {}, {}, {}
    others = [k for k in range(len(weights)) if k not in masked]

    def spread(k):
        """The scale of each entry."""
        width = weights[k].shape[1] // case.groups
        return np.repeat(scales[k], width, axis=1)[:, :, None]

    for step in range(1, case.steps + 1):
        for k in masked:
            if step in case.refresh:
                kept[k] = largest(np.abs(weights[k][:, :, 0]), trace)[:, :, None]
            if step == case.end + 1:
                masks[k] = largest(np.abs(weights[k][:, :, 0]), trace)[:, :, None]
                weights[k] = weights[k] * masks[k]
        used = [
            w * spread(k) * masks.get(k, 1) if k in masked else w for k, w in enumerate(weights)
        ]
        gradients, inputs = differentiate(case, used, used, *batch(case, step))
        gradients_of_scales = {}
        for k in masked:
            g = gradients[k] * masks.get(k, 1)
            products = (g * weights[k])[:, :, 0].reshape(len(g), case.groups, -1)
            gradients_of_scales[k] = products.sum(2)
            gradients[k] = g * spread(k)
        clip(gradients)
        ramp = (step - 1) / case.end
        for k in masked:
            decays = 0 if k in masks else 1 - kept[k]
            scaled = ramp * case.decay * np.sign(weights[k])
            new = adams(weights[k], gradients[k], moments.setdefault(k, {}), decays, ramp, scaled)
            if k in masks:
                new = new * masks[k]
            gradient = gradients_of_scales[k]
            (scales[k],) = adamw([scales[k]], [gradient], state.setdefault(k, {}))
            weights[k] = new
        updated = adamw(
            [weights[k] for k in others],
            [gradients[k] for k in others],
            state.setdefault("others", {}),
        )
        for k, w in zip(others, updated, strict=True):
            weights[k] = w
        shown = {k: (masks.get(k, np.ones_like(weights[k])),) * 2 for k in masked}
        record(case, step, trace, masked, shown, inputs, gradients, weights)


def adams(w, g, state, decays, ramp, decay, rate=0.02, betas=(0.9, 0.95), weight_decay=0.1):
    """A step of AdamS: the moment, decayed where `decays` is 1, also makes the second moment."""
    t = state["t"] = state.get("t", 0) + 1
    mu = state["mu"] = betas[0] * state.get("mu", 0.0) + (1 - betas[0]) * g
    used = np.where(decays == 1, (1 - ramp) * mu + decay, mu)
    v = state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * used**2
    mean, square = used / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    return w * (1 - rate * weight_decay) - rate * mean / (np.sqrt(square) + 1e-8)


def select(case, k, weight, known, permutations, step, trace):
    """The forward and the backward mask of layer k in the forward pass of a step."""
    matrix = as_matrix(case, weight)
    if case.method in ("asp", "rigl") and known is not None:
        return known
    if step < case.fades_until:
        return np.ones_like(weight), np.ones_like(weight)
    if case.method == "slope":
        if known is None:
            forward = largest(np.abs(matrix), trace)
        else:
            forward = as_matrix(case, known[0])
        backward = known and as_matrix(case, known[1])
        if step in case.refresh:
            backward = largest(np.abs(matrix * forward).T, trace).T * forward
        return from_matrix(case, forward, weight.shape), from_matrix(case, backward, weight.shape)
    if case.method == "transposable":
        if step not in case.refresh:
            return known
        mask = from_matrix(case, best_tiles(matrix, trace), weight.shape)
        return mask, mask
    mask = largest(np.abs(matrix), trace, M - 1 if step < case.wide_until else N)
    if case.method != "bi-mask":
        return from_matrix(case, mask, weight.shape), from_matrix(case, mask, weight.shape)
    kept = matrix * mask
    if step in case.searches:
        permutations[k] = best_permutation(case, kept, case.searches.index(step))
    order = permutations.get(k, np.arange(len(kept)))
    back = np.zeros_like(mask)
    back[order] = largest(np.abs(kept[order]).T, trace).T
    return from_matrix(case, mask, weight.shape), from_matrix(case, back * mask, weight.shape)


def as_matrix(case, weight):
    """``[out, in * taps]``, in the order in which blocks lie in it."""
    if case.flat:
        return weight.reshape(len(weight), -1)
    return np.moveaxis(weight, 1, -1).reshape(len(weight), -1)


def from_matrix(case, matrix, shape):
    """Undo :func:`as_matrix` for a weight of this shape."""
    if case.flat or len(shape) == 2:
        return matrix.reshape(shape)
    return np.moveaxis(matrix.reshape(shape[0], shape[2], shape[1]), -1, 1)


def train_lbc(case, weights, masked, trace):
    """Learning Best Combination; 0 is the score of a removed pattern."""
    state = {}
    # An entry is in 3 of the 6 patterns, whose scores add up to 1.
    scores = {k: np.full((weights[k].size // M, len(PATTERNS)), 1 / 3) for k in masked}
    alive = {k: np.ones(scores[k].shape, bool) for k in masked}
    for step in range(1, case.steps + 1):
        share = min((step - 1) / case.stop, 1)
        count = 1 + int(np.ceil((len(PATTERNS) - 1) * (1 - share) ** 3 - 1e-12))
        masks = {}
        for k in masked:
            for block, left in zip(scores[k], alive[k], strict=True):
                while left.sum() > count:
                    lowest, second = np.argsort(np.where(left, block, np.inf))[:2]
                    trace.margin = min(
                        trace.margin, (block[second] - block[lowest]) / abs(block).max()
                    )
                    left[lowest] = False
            scores[k] = np.where(alive[k], scores[k], 0)
            kept = (alive[k] @ PATTERNS > 0).astype(float)
            masks[k] = from_matrix(case, kept.reshape(len(weights[k]), -1), weights[k].shape)
            weights[k] = weights[k] * masks[k]
        gradients, inputs = differentiate(case, weights, weights, *batch(case, step))
        of_scores = []
        for k in masked:
            of_mask = as_matrix(case, gradients[k] * weights[k]).reshape(-1, M)
            of_scores.append((of_mask @ PATTERNS.T) * alive[k])
            gradients[k] = gradients[k] * masks[k]
        if count == 1:
            of_scores = [np.zeros_like(each) for each in of_scores]
        trained = sgd([*weights, *(scores[k] for k in masked)], [*gradients, *of_scores], state)
        weights = trained[: len(weights)]
        scores = dict(zip(masked, trained[len(weights) :], strict=True))
        weights = [w * masks[k] if k in masks else w for k, w in enumerate(weights)]
        shown = {k: (masks[k], masks[k]) for k in masked}
        record(case, step, trace, masked, shown, inputs, gradients, weights)


def train_maxq(case, weights, masked, trace):
    """MaxQ: the soft masks are those of the code, by ranks."""
    state = {}
    for step in range(1, case.steps + 1):
        share = max(1 - (step - 1) / case.stop, 0)
        masks, forward = {}, list(weights)
        for k in masked:
            matrix = as_matrix(case, weights[k])
            mask = largest(abs(matrix), trace).reshape(-1, M)
            sums = abs(matrix).reshape(-1, M).sum(1)
            order = np.argsort(sums)
            dense = int(share * len(sums))
            if 0 < dense < len(sums):
                trace.margin = min(trace.margin, sums[order[dense]] / sums[order[dense - 1]] - 1)
            mask[order[:dense]] = 1
            masks[k] = from_matrix(case, mask.reshape(matrix.shape), weights[k].shape)
            filters = soft_mask(weights[k].reshape(len(weights[k]), -1), trace)
            positions = soft_mask(weights[k].reshape(-1, weights[k].shape[2]).T, trace)
            soft = filters.reshape(weights[k].shape) + positions.T.reshape(weights[k].shape)
            forward[k] = weights[k] * masks[k] * (1 + soft)
        gradients, inputs = differentiate(case, forward, forward, *batch(case, step))
        for k in masked:
            gradients[k] = gradients[k] + case.decay * (1 - masks[k]) * weights[k]
        weights = sgd(weights, gradients, state)
        shown = {k: (masks[k], masks[k]) for k in masked}
        record(case, step, trace, masked, shown, inputs, gradients, weights)


def soft_mask(rows, trace, tau=0.01):
    """For each row, sigmoid((|w| - threshold) / tau) at the largest N / M of its entries, 0 elsewhere."""
    soft = np.zeros_like(rows)
    for values_of_row, result in zip(abs(rows), soft, strict=True):
        order = np.argsort(values_of_row)
        below = int((M - N) / M * len(order))
        threshold = values_of_row[order[below - 1 : below + 1]].mean()
        trace.margin = min(trace.margin, values_of_row[order[below]] / threshold - 1)
        above = order[below:]
        result[above] = 1 / (1 + np.exp(-(values_of_row[above] - threshold) / tau))
    return soft


def first_noise(count, layer):
    """What takes the place of the normal numbers of a layer's first logits."""
    return values((count,), 700 + layer)


def gumbel_noise(count, layer, step):
    """What takes the place of Gumbel numbers in a step, from 1."""
    return 2 * values((count,), 800 + 100 * layer + step)


def train_mask_logits(case, weights, masked, trace, strength=3.0, regularisation=1e-5):
    """MaskLLM: of masked layers the gradients and values are those of the logits."""
    logits, state = {}, {}
    for k in masked:
        blocks = as_matrix(case, weights[k]).reshape(-1, M)
        prior = largest(abs(blocks), trace)
        noise = first_noise(len(blocks) * len(PATTERNS), k).reshape(len(blocks), -1)
        logits[k] = 0.01 * noise + strength * 0.01 * (prior @ PATTERNS.T - 1)
    for step in range(1, case.steps + 1):
        progress = (step - 1) / case.stop
        scale, tau = 100 + 400 * progress, 4 + (0.05 - 4) * progress
        hard, forward, choices, soft = {}, list(weights), {}, {}
        for k in masked:
            ranked = np.sort(logits[k], axis=1)
            trace.margin = min(trace.margin, (1 - ranked[:, -2] / ranked[:, -1]).min())
            best = PATTERNS[logits[k].argmax(1)].astype(float)
            hard[k] = from_matrix(case, best.reshape(len(weights[k]), -1), weights[k].shape)
            z = (
                scale * logits[k] + gumbel_noise(logits[k].size, k, step).reshape(logits[k].shape)
            ) / tau
            e = np.exp(z - z.max(1, keepdims=True))
            choices[k] = e / e.sum(1, keepdims=True)
            mask = (choices[k] @ PATTERNS).reshape(len(weights[k]), -1)
            soft[k] = from_matrix(case, mask, weights[k].shape)
            forward[k] = weights[k] * soft[k]
        gradients, inputs = differentiate(case, forward, forward, *batch(case, step))
        for k in masked:
            # L - r (1 - t / T) sum (W m)^2
            fading = regularisation * (1 - progress)
            of_mask = gradients[k] * weights[k] - 2 * fading * weights[k] ** 2 * soft[k]
            of_choice = as_matrix(case, of_mask).reshape(-1, M) @ PATTERNS.T
            mean = (choices[k] * of_choice).sum(1, keepdims=True)
            gradients[k] = scale / tau * choices[k] * (of_choice - mean)
        trained = sgd([logits.get(k, w) for k, w in enumerate(weights)], gradients, state)
        logits = {k: trained[k] for k in masked}
        weights = [w if k in logits else trained[k] for k, w in enumerate(weights)]
        shown = {k: (hard[k], hard[k]) for k in masked}
        record(case, step, trace, masked, shown, inputs, gradients, logits)


def record(case, step, trace, masked, masks, inputs, gradients, weights):
    """Add a step to the trace, if it is to be recorded; `masks` are those of the forward and of the backward pass."""
    if step in case.recorded:
        trace.forward.append([masks[k][0].astype(bool) for k in masked])
        trace.backward.append([masks[k][1].astype(bool) for k in masked])
        trace.dx.append([inputs[k] for k in masked if k])
        trace.dw.append([gradients[k] for k in masked])
        trace.weights.append([weights[k] for k in masked])


def soft_threshold(weight, k, scales):
    """``beta S(W)`` of a linear layer, with the factor of the first call for layer k."""
    blocks = weight.reshape(-1, M)
    threshold = np.sort(np.abs(blocks), axis=1)[:, M - N - 1 : M - N]
    shrunk = (np.sign(blocks) * np.maximum(np.abs(blocks) - threshold, 0)).reshape(weight.shape)
    scales.setdefault(k, (weight * shrunk).sum() / (shrunk * shrunk).sum())
    return scales[k] * shrunk


def freeze_if_settled(case, masked, state):
    """STEP's switch after a step: the bias-corrected second moments that are used from now on."""
    if "frozen" in state:
        return
    t, beta = state["t"], 0.95
    changes = state.setdefault("changes", [])
    changes.append(np.concatenate([state["moved", k].ravel() for k in masked]).mean())
    window = 20  # 1 / (1 - beta)
    earliest, latest = case.sparse_from
    settled = np.mean(changes[-window:]) < case.threshold
    if (settled and t + 1 >= earliest) or t + 1 >= latest:
        state["frozen"] = {k: state[k][1] / (1 - beta**t) for k in masked}
        state["switch"] = t + 1


def largest(scores, trace, n=N):
    """1 at the n largest of each M consecutive scores of a row."""
    blocks = scores.reshape(-1, M)
    order = np.argsort(-blocks, axis=1)
    ranked = np.take_along_axis(blocks, order, 1)
    distinct = ranked[:, n - 1] > 0  # zeros are pruned in any case
    if distinct.any():
        trace.margin = min(
            trace.margin, ((ranked[:, n - 1] - ranked[:, n]) / ranked[:, 0].max())[distinct].min()
        )
    mask = np.zeros_like(blocks)
    np.put_along_axis(mask, order[:, :n], 1, 1)
    return mask.reshape(scores.shape)


def best_tiles(matrix, trace):
    """Of each M x M tile, the transposable mask that keeps most."""
    mask = np.zeros_like(matrix)
    for i, j in itertools.product(range(0, matrix.shape[0], M), range(0, matrix.shape[1], M)):
        tile = np.abs(matrix[i : i + M, j : j + M])
        kept = np.array([(tile * each).sum() for each in TILES])
        first, second = np.argsort(-kept)[:2]
        trace.margin = min(trace.margin, (kept[first] - kept[second]) / kept[first])
        mask[i : i + M, j : j + M] = TILES[first]
    return mask


def best_permutation(case, kept, search):
    """The first of the candidates with the most nonzeros that blocks of M rows can keep."""
    found = candidates(len(kept), case.candidates, search)
    scores = [
        np.minimum((kept[p] != 0).reshape(-1, M, kept.shape[1]).sum(1), N).sum() for p in found
    ]
    return found[int(np.argmax(scores))]


def differentiate(case, forward, backward, x, target):
    """Gradients of ``mean((head(mean(h)) - target)**2)`` for every weight and for every layer's input."""
    hidden = [x]
    for w, (_, _, taps) in zip(forward, case.sizes, strict=False):
        positions = hidden[-1].shape[2] - taps + 1
        y = sum(
            np.einsum("oc,bcp->bop", w[:, :, t], hidden[-1][:, :, t : t + positions])
            for t in range(taps)
        )
        hidden.append(np.tanh(y))
    pooled = hidden[-1].mean(2)
    error = pooled @ forward[-2].T + forward[-1] - target
    d_out = 2 * error / error.size
    gradients = [None] * len(forward)
    gradients[-2:] = [d_out.T @ pooled, d_out.sum(0)]
    d_pooled = d_out @ backward[-2]
    inputs = {len(case.sizes): d_pooled}
    grad = np.repeat(d_pooled[:, :, None] / hidden[-1].shape[2], hidden[-1].shape[2], 2)
    for k in reversed(range(len(case.sizes))):
        taps, x = case.sizes[k][2], hidden[k]
        dy = grad * (1 - hidden[k + 1] ** 2)
        positions = dy.shape[2]
        gradients[k] = np.stack(
            [np.einsum("bop,bcp->oc", dy, x[:, :, t : t + positions]) for t in range(taps)], axis=2
        )
        grad = np.zeros_like(x)
        for t in range(taps):
            grad[:, :, t : t + positions] += np.einsum("bop,oc->bcp", dy, backward[k][:, :, t])
        inputs[k] = grad
    return gradients, inputs


def clip(gradients, most=0.05):
    """Scale the gradients to a norm of at most ``most``."""
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    for k, g in enumerate(gradients):
        gradients[k] = g * min(1.0, most / (norm + 1e-6))


def sgd(weights, gradients, state, rate=0.2, momentum=0.9, weight_decay=1e-4):
    """A step of SGD with momentum."""
    step = [g + weight_decay * w for w, g in zip(weights, gradients, strict=True)]
    state["momentum"] = (
        [momentum * m + g for m, g in zip(state["momentum"], step, strict=True)] if state else step
    )
    return [w - rate * m for w, m in zip(weights, state["momentum"], strict=True)]


def adamw(weights, gradients, state, rate=0.02, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8):
    """A step of AdamW."""
    t = state["t"] = state.get("t", 0) + 1
    new = []
    for k, (w, g) in enumerate(zip(weights, gradients, strict=True)):
        m, v = state.get(k, (np.zeros_like(w), np.zeros_like(w)))
        before = v
        m, v = state[k] = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        state["moved", k] = np.abs(v - before)
        mean, square = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        square = state.get("frozen", {}).get(k, square)
        new.append(w * (1 - rate * weight_decay) - rate * mean / (np.sqrt(square) + eps))
    return new
