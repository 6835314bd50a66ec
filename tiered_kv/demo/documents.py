"""Real texts to chat about: chapters of the Python reference, which come with Python itself.

They are the texts behind `help("TOPIC")`, by the Python Software Foundation, and are read from
the running interpreter; nothing of them is kept here.
"""

from pydoc_data.topics import topics
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tiered_kv.errors import BadInput


class Document(NamedTuple):
    """A text and two questions about it; the second one goes on after the first's answer."""

    name: str
    text: str
    first_question: str
    second_question: str


# topic: (first question, second question). A small model reads them, hence the short answers.
_QUESTIONS = {
    "import": (
        "How is the basic import statement executed? Answer in one sentence.",
        "What is the first step? Answer in one sentence.",
    ),
    "objects": (
        "What does it mean that an object is mutable? Answer in one sentence.",
        "Give an example of an immutable type. Answer in one sentence.",
    ),
    "typesmapping": (
        "What is a mapping object? Answer in one sentence.",
        "What does len(d) return? Answer in one sentence.",
    ),
    "compound": (
        "What does the if statement do? Answer in one sentence.",
        "What does the while statement do? Answer in one sentence.",
    ),
    "debugger": (
        "What is pdb? Answer in one sentence.",
        "What can I do with breakpoints? Answer in one sentence.",
    ),
    "naming": (
        "What is a local variable? Answer in one sentence.",
        "What is a global variable? Answer in one sentence.",
    ),
    "string-methods": (
        "What does str.capitalize do? Answer in one sentence.",
        "What does str.center do? Answer in one sentence.",
    ),
    "customization": (
        "According to this text, what is __new__ called for?",
        "What does __repr__ do? Answer in one sentence.",
    ),
    "formatstrings": (
        "What is this text about? Answer in one sentence.",
        "What are replacement fields surrounded by? Answer in one sentence.",
    ),
    "attribute-access": (
        "When is __getattr__ called? Answer in one sentence.",
        "What does __setattr__ do? Answer in one sentence.",
    ),
    "comparisons": (
        "What is this text about? Answer in one sentence.",
        "What values do comparisons yield? Answer in one sentence.",
    ),
    "async": (
        "What does async def define? Answer in one sentence.",
        "What does async for do? Answer in one sentence.",
    ),
    "assignment": (
        "According to this text, what are assignment statements used for?",
        "What happens when the target list is a single target? Answer in one sentence.",
    ),
    "typesseq": (
        "What is this text about? Answer in one sentence.",
        "What does len(s) return? Answer in one sentence.",
    ),
    "execmodel": (
        "What is a code block? Answer in one sentence.",
        "What happens when a name is not found at all? Answer in one sentence.",
    ),
    "try": (
        "What does the except clause do? Answer in one sentence.",
        "When is the finally clause executed? Answer in one sentence.",
    ),
    "numeric-types": (
        "What is this text about? Answer in one sentence.",
        "What does __add__ do? Answer in one sentence.",
    ),
    "identifiers": (
        "What is this text about? Answer in one sentence.",
        "What are keywords? Answer in one sentence.",
    ),
}

MAX_DOCUMENTS = len(_QUESTIONS)


def documents(
    tokenizer: PreTrainedTokenizerBase, count: int = 16, budget_tokens: int = 1100
) -> list[Document]:
    """The first `count` documents, each cut at the end of a line within `budget_tokens` tokens.

    Raises `BadInput` for a count outside 1..`MAX_DOCUMENTS` or a budget below 64.
    """
    if not 1 <= count <= MAX_DOCUMENTS:
        raise BadInput(f"there are 1 to {MAX_DOCUMENTS} documents, not {count}")
    if budget_tokens < 64:
        raise BadInput(f"budget_tokens must be at least 64, not {budget_tokens}")
    return [
        Document(name, _trim(tokenizer, topics[name], budget_tokens), *questions)
        for name, questions in list(_QUESTIONS.items())[:count]
    ]


def _trim(tokenizer: PreTrainedTokenizerBase, text: str, budget_tokens: int) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)[:budget_tokens]
    kept = str(tokenizer.decode(ids))
    return kept if kept == text else kept.rsplit("\n", 1)[0].rstrip()
