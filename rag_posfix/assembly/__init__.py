"""Assembly: documents in, an ordered and tokenised prompt with an exact layout out."""

from rag_posfix.assembly.assembler import Assembled, Assembler
from rag_posfix.assembly.documents import Dropped
from rag_posfix.assembly.layout import encode_passage, lay_out
from rag_posfix.assembly.orders import ORDERS, Order
from rag_posfix.assembly.prompt import PromptTemplate, merge_messages

__all__ = [
    "ORDERS",
    "Assembled",
    "Assembler",
    "Dropped",
    "Order",
    "PromptTemplate",
    "encode_passage",
    "lay_out",
    "merge_messages",
]
