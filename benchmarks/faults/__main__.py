"""Faults of the running service under load, as a table: what failed, what was wrong, what it cost.

    python -m benchmarks.faults [--json] [--out DIR] [--only NAME] [--seconds 5] [--requests 10000] [--long 20000]
                                [--deleted 10000]

A generator without weights answers, so that every correct answer is known. The service runs in a process of its own,
real servers of Redis in others. ``failed`` counts requests without a whole answer, ``wrong`` those with a wrong one,
``undocumented`` statuses that the OpenAPI document does not have, ``lost`` stored answers that were not found again.
``served`` counts answers of deleted documents. ``added`` is the median during the fault less the median before it,
``worst`` the longest request since it began, ``live_worst`` the longest GET of /livez, ``mib`` the memory of the
process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.deletions import after_eviction, after_failover
from benchmarks.faults.fuzz import fuzz, growth
from benchmarks.faults.scenarios import (
    FAILOVERS,
    FAULTS,
    disk_full,
    failover,
    leaving_clients,
    pipelining,
    redis_fault,
    slow_clients,
    unread_searches,
)
from benchmarks.faults.service import Host, fault_table
from benchmarks.study import study_options, write_study
from benchmarks.tables import table


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("faults", __doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="measure this row of the table; repeatable")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load before, during and after each fault")
    parser.add_argument("--requests", type=int, default=10_000, help="of the fuzzed requests")
    parser.add_argument("--long", type=int, default=20_000, help="requests of the memory curve")
    parser.add_argument("--deleted", type=int, default=10_000, help="deleted documents")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--name", default="service-faults", help="of the record")
    return parser.parse_args(arguments)


def measurements(host: Host, chosen: argparse.Namespace, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what measures each row, by its name."""
    return {
        **{f"Redis {name}": partial(redis_fault, host, name, chosen.seconds) for name in FAULTS},
        **{f"Redis {name}": partial(failover, host, name, chosen.seconds) for name in FAILOVERS},
        "disk full": lambda: disk_full(host, folder, chosen.seconds),
        "slow clients": lambda: slow_clients(host, chosen.seconds),
        "leaving clients": lambda: leaving_clients(host, chosen.seconds),
        "pipelining": lambda: pipelining(host, chosen.seconds),
        "unread searches": lambda: unread_searches(host, folder / "data", chosen.seconds),
        "fuzzed": lambda: fuzz(host.serve(), chosen.requests),
        "memory": lambda: growth(host, chosen.long),
        "deleted, evicted": lambda: after_eviction(chosen.deleted),
        "deleted, failover": lambda: after_failover(chosen.deleted),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    chosen = options(arguments)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        host = Host()
        measured = measurements(host, chosen, Path(folder))
        unknown = set(chosen.only or ()) - set(measured)
        if unknown:
            raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(measured)}")
        with host:
            for name in chosen.only or measured:
                print(f"{name} ...", file=sys.stderr)
                rows[name] = measured[name]()
    tables = {chosen.name: fault_table(rows)}
    print(json.dumps(rows, indent=2) if chosen.json else table([{"kind": chosen.name, "tables": tables}]))
    write_study(chosen, chosen.name, rows, tables=tables)
    return rows


if __name__ == "__main__":
    main()
