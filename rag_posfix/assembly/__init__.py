"""Assembly: documents in, an ordered and tokenised prompt with an exact layout out."""

from rag_posfix.assembly.assembler import Assembled, Assembler
from rag_posfix.assembly.documents import Dropped
from rag_posfix.assembly.orders import ORDERS, Order, OrderInputs
from rag_posfix.assembly.orders.cache_aware import RecentPrompts
from rag_posfix.assembly.templates import PromptTemplate, merge_messages, read_template, shipped_templates
from rag_posfix.assembly.tokenization import PassageBudget, tokenize_passage, tokenize_prompt

__all__ = [
    "ORDERS",
    "Assembled",
    "Assembler",
    "Dropped",
    "Order",
    "OrderInputs",
    "PassageBudget",
    "PromptTemplate",
    "RecentPrompts",
    "merge_messages",
    "read_template",
    "shipped_templates",
    "tokenize_passage",
    "tokenize_prompt",
]
