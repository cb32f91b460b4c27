"""The short table of the comparison with other tools."""

from __future__ import annotations

import json

from benchmarks.peers.__main__ import RESULTS
from benchmarks.peers.table import table
from benchmarks.tables.markdown import Tables

TABLES: Tables = {
    "peers-short": lambda: table(json.loads(RESULTS.read_text(encoding="utf-8"))["ran"], short=True)
}
