"""A retrieval-augmented application: documents in FAISS, a question, the answer and its sources."""

from contextlib import closing

from langchain_core.documents import Document

from rag_posfix import FaissVectorStore, SentenceEmbeddings, build_pipeline

DOCUMENTS = [
    Document("The Torvane lighthouse was designed by Anders Wick and first lit in 1883.", id="torvane"),
    Document("The Maravel lighthouse was designed by Ilse Korvanth and first lit in 1871.", id="maravel"),
    Document("The Brenholt lighthouse was designed by Jonas Aldring and first lit in 1902.", id="brenholt"),
    Document("The ferry Ostrilla sank in 1909 on its way to Brenholt.", id="ostrilla"),
]


def main() -> None:
    """Ask one question and print where the answer comes from."""
    store = FaissVectorStore.from_documents(DOCUMENTS, SentenceEmbeddings())
    retriever = store.as_retriever(search_kwargs={"k": 3})
    with closing(build_pipeline(retriever=retriever)) as rag:
        answer = rag.ask("Who designed the Maravel lighthouse?")
    print(answer.text)
    for document in answer.documents:
        print(f"{document.id:10} attention {document.attention:.0%}  {document.text}")


if __name__ == "__main__":
    main()
