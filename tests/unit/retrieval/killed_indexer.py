"""A process that updates an index with slow embeddings: to be killed, or to be met by another."""

import sys
import time

from rag_posfix.retrieval.indexing import update_index
from tests.support.letter_embeddings import LetterEmbeddings


class SlowEmbeddings(LetterEmbeddings):
    """Says on stdout when a step begins; steps after the first never end."""

    def embed_documents(self, texts):
        sys.stdout.write("step\n")
        sys.stdout.flush()
        if self.texts:
            time.sleep(600)
        return super().embed_documents(texts)


if __name__ == "__main__":
    update_index(sys.argv[1:-1], sys.argv[-1], SlowEmbeddings())
