"""The OpenAI client against the HTTP service, with passages in the request.

Start the service in another terminal: rag-posfix serve --port 8000
"""

import sys

from openai import OpenAI

PASSAGES = [
    {"id": "torvane", "text": "The Torvane lighthouse was designed by Anders Wick and first lit in 1883."},
    {"id": "maravel", "text": "The Maravel lighthouse was designed by Ilse Korvanth and first lit in 1871."},
]


def main(address: str) -> None:
    """Stream one answer, then ask again with the passages in the other order."""
    with OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        answers = [ask(client, passages) for passages in (PASSAGES, PASSAGES[::-1])]
    print("the same answer for both orders:", answers[0] == answers[1])


def ask(client: OpenAI, passages: list[dict[str, str]]) -> str:
    """Return the answer, printed while it arrives."""
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Who designed the Maravel lighthouse?"}],
        max_tokens=24,
        stream=True,
        extra_body={"documents": passages},
    )
    pieces = []
    for chunk in stream:
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        print(piece, end="", flush=True)
        pieces.append(piece)
    print()
    return "".join(pieces)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
