"""The table of a sentence encoder at N:M, pruned and trained with the dense one as teacher."""

from __future__ import annotations

from statistics import mean

from benchmarks.tables.markdown import Tables, read_json, table

METHODS = ("", "asp", "bame")


def embeddings() -> str:
    """Mean cosine to the dense embeddings, and Spearman's correlation with the similarities of the dense ones."""
    runs = read_json("minilm.json")["runs"]
    rows = []
    for pattern in dict.fromkeys(run["pattern"] for run in runs):
        cells = [pattern]
        for method in METHODS:
            found = [run for run in runs if (run["pattern"], run["method"]) == (pattern, method)]
            means = [mean(run[key] for run in found) for key in ("cosine", "spearman") if found]
            cells.append(", ".join(f"{each:.3f}" for each in means))
        rows.append(cells)
    return table(["pattern", "pruned", "`asp`", "`bame`"], rows)


TABLES: Tables = {"minilm": embeddings}
