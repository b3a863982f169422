"""Key files as earlier releases wrote them, with scrypt hashes."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from rag_posfix_api.keys.store import split_key


def scrypt_hash(secret: str, salt: bytes = b"0123456789abcdef") -> str:
    """The hash that earlier releases kept of a secret; their salt was random."""
    hashed = hashlib.scrypt(secret.encode(), salt=salt, n=2**14, r=8, p=1, maxmem=2**26, dklen=32)
    return f"scrypt$14$8$1${base64.b64encode(salt).decode()}${base64.b64encode(hashed).decode()}"


def make_old(folder: Path, *keys: str) -> None:
    """Replace the digests of keys in the key file of a folder by scrypt hashes."""
    file = folder / "keys.json"
    data = json.loads(file.read_text())
    secrets = dict(parts for parts in map(split_key, keys) if parts is not None)
    for entry in data["keys"]:
        if entry["id"] in secrets:
            entry["hash"] = scrypt_hash(secrets[entry["id"]])
    file.write_text(json.dumps(data))


def hashes(folder: Path) -> dict[str, str]:
    """What the key file keeps of each secret, by id."""
    return {entry["id"]: entry["hash"] for entry in json.loads((folder / "keys.json").read_text())["keys"]}
