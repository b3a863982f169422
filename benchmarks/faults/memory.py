"""How the memory of the service grows over many requests."""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.faults.host import Host
from benchmarks.faults.load import QUESTIONS, Connection, body_of, right_answer, text_of
from tests.support.serving import CHAT


def growth(host: Host, requests: int, samples: int = 40) -> dict[str, Any]:
    """Return the memory of the service and its growth for each request after the first half, which warms it up.

    Questions are asked whole and as streams, with and without the answer cache, and every tenth body is refused.

    Args:
        requests: How many are sent.
        samples: How often memory is measured.
    """
    url = host.serve(memory_entries=50)
    chance, connection = random.Random(0), Connection(url)
    curve: list[tuple[int, float]] = []
    wrong = 0
    for number in range(requests):
        if number % max(1, requests // samples) == 0:
            curve.append((number, host.rss_bytes() / 2**20))
        asked = chance.randrange(QUESTIONS)
        if number % 10 == 9:
            status, _ = connection.post(CHAT, chance.choice((b"{", b'{"messages":[]}', b"[1]")))
            wrong += status not in (400, 422)
            continue
        fields = {"stream": chance.random() < 0.3, "cache": chance.random() < 0.7}
        status, answer = connection.post(CHAT, body_of(asked, **fields))
        wrong += status != 200 or text_of(answer) != right_answer(asked)
    connection.close()
    late = curve[len(curve) // 2 :]
    slope = statistics.linear_regression([at for at, _ in late], [mib for _, mib in late]).slope
    return {
        "requests": requests,
        "wrong": wrong,
        "mib": [round(mib, 1) for _, mib in curve],
        "grown_mib": round(late[-1][1] - late[0][1], 2),
        "bytes_per_request": round(slope * 2**20, 1),
    }
