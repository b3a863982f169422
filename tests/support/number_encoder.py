"""The encoder of models whose tokens have no text."""


class NumberEncoder:
    """Writes token n as "n,"; ``eos_ids`` end an answer."""

    def __init__(self, eos_ids=()):
        self.eos_ids = frozenset(eos_ids)

    def decode_answer(self, token_ids):
        return "".join(f"{token}," for token in token_ids if token not in self.eos_ids)

    def token_bytes(self, token_id):
        return f"{token_id},".encode()
