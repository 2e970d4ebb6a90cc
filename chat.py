"""Conversations: question/answer rows, the chat template, and ids by it.

In:  rows with questions and answers; messages {"role": "system", "user" or "assistant", "content": text}.
Out: `<|user|>question<|assistant|>answer<|endoftext|>` as ids (T,), and which of these are learnt.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from configurator import UserError
from textfile import FileReader
from tokenizer import CHAT_TOKENS, FileTokenizer, TiktokenTokenizer, Tokenizer, load_tokenizer

ROLES = ("system", "user", "assistant")
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))  # fields of a row
PROBE = [
    {"role": "user", "content": " What does  len() do?\n"},
    {"role": "assistant", "content": "It counts. "},
    {"role": "user", "content": "And <b>?"},
]


def special_texts(tokenizer: Tokenizer) -> list[str]:
    """The special tokens as they are written, a longer one before those that it may contain."""
    if isinstance(tokenizer, TiktokenTokenizer):
        found = tokenizer.encoding.special_tokens_set
    else:
        found = {token.content for token in tokenizer.inner.get_added_tokens_decoder().values() if token.special}
    return sorted(found | {tokenizer.identity["eot_token"]}, key=lambda text: (-len(text), text))


def in_two(special: str) -> str:
    """A special token's text with a space after its first character, which no tokenizer takes for the token."""
    return f"{special[0]} {special[1:]}"


def chat_template(tokenizer: Tokenizer) -> str:
    """The Jinja template that makes the text of `encode_chat` in transformers, vLLM and llama.cpp.

    Special tokens are put together from parts: by what a template holds, llama.cpp without Jinja takes it for another.
    """

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    parts = [(quoted(s[0]), quoted(s[1:]), quoted(in_two(s))) for s in special_texts(tokenizer)]
    plain = "".join(f" | replace({first} + {rest}, {harmless})" for first, rest, harmless in parts)
    return (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{{ message['content']" + plain + " }}"
        "{% if message['role'] == 'assistant' %}{{ " + quoted(tokenizer.identity["eot_token"]) + " }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|' + 'assistant' + '|>' }}{% endif %}"
    )


def restore_tokenizer(identity: dict[str, Any], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of a meta.json or a checkpoint, as load_tokenizer has it, with chat tokens where it names a template."""
    plain = {key: value for key, value in identity.items() if key != "chat_template"}
    tokenizer = load_tokenizer(plain, folder)
    return with_chat(tokenizer, identity["chat_template"]) if "chat_template" in identity else tokenizer


def with_chat(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The tokenizer with the chat tokens, those of its file or the ids after its last, and `template` in its identity."""
    identity = tokenizer.identity | {"chat_template": template}
    if isinstance(tokenizer, TiktokenTokenizer):
        old = tokenizer.encoding  # extended in the way of tiktoken's README
        special = dict(old._special_tokens)
        for token in CHAT_TOKENS:
            special.setdefault(token, max(old.max_token_value, *special.values()) + 1)
        parts = {"pat_str": old._pat_str, "mergeable_ranks": old._mergeable_ranks}
        made = TiktokenTokenizer(type(old)("chat", special_tokens=special, **parts), identity, tokenizer.eot_id)
    else:
        inner = type(tokenizer.inner).from_str(tokenizer.inner.to_str())
        inner.add_special_tokens(list(CHAT_TOKENS))
        inner.encode_special_tokens = True  # which is no part of a file
        made, special = FileTokenizer(inner, identity, tokenizer.eot_id), inner.get_vocab(with_added_tokens=True)
    made.chat_ids = {token[2:-2]: special[token] for token in CHAT_TOKENS}
    return made


def chat_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the chat tokens and this template. Raises UserError where these cannot do in it what they must."""
    made, name = with_chat(tokenizer, ""), tokenizer.identity["name"]
    made.identity["chat_template"], specials = chat_template(made), special_texts(made)
    taken = {i: tokenizer.decode([i]) for i in made.chat_ids.values() if i < tokenizer.vocab_size}
    if any(taken.get(i, f"<|{role}|>") != f"<|{role}|>" for role, i in made.chat_ids.items()):
        raise UserError(f"{name} has gaps in its ids, which chat tokens would take: {taken}")
    if odd := [text for text in specials if any(other in in_two(text) for other in specials)]:
        raise UserError(f"{name} has special tokens that a question cannot hold as text: {', '.join(map(repr, odd))}")
    if isinstance(made, FileTokenizer) and not reads_alike(made):
        raise UserError(
            f"{name} gives a text other ids inside of a conversation than by itself, and no server could follow: take gpt2 "
            "or a tokenizer that prepare.py trains"
        )
    return made


def reads_alike(tokenizer: FileTokenizer) -> bool:
    """Whether a conversation has the same ids in one piece, as servers encode it; True where it cannot write the probe."""
    ends = {"assistant": tokenizer.identity["eot_token"]}
    text = "".join(f"<|{m['role']}|>{m['content']}{ends.get(m['role'], '')}" for m in PROBE)
    try:
        wanted = encode_chat(tokenizer, PROBE)[0].tolist()
        tokenizer.inner.encode_special_tokens = False
        return tokenizer.inner.encode(text, add_special_tokens=False).ids == wanted
    except UserError:
        return True
    finally:
        tokenizer.inner.encode_special_tokens = True


def plain_content(message: dict[str, str], specials: list[str]) -> str:
    """The text of a message, in which what is written like a special token is none."""
    return functools.reduce(lambda text, special: text.replace(special, in_two(special)), specials, message["content"])


def encode_chat(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a conversation, uint32 (T,), and which of them a model learns, bool (T,): answers, each with its end.

    A message is its role's token and its content, which is encoded on its own: a boundary between messages is one between
    tokens. Servers look for special tokens in the whole text, so `<|user|>` in a content is taken as `< |user|>`, here
    and by the template. Raises UserError for a tokenizer without this version's template.
    """
    template, specials = tokenizer.identity.get("chat_template"), special_texts(tokenizer)
    if template is None:
        raise UserError(
            "this model was not trained to chat, fine-tune it first: ./start_train.sh config/finetune_chat.py"
        )
    if template != chat_template(tokenizer):
        raise UserError("this model was trained to chat with the template of another version: fine-tune it anew")
    ids: list[int] = []
    counted: list[bool] = []
    for message in messages:
        answer = message["role"] == "assistant"
        body = tokenizer.encode(plain_content(message, specials)).tolist()
        ids += [tokenizer.chat_ids[message["role"]], *body, *[tokenizer.eot_id] * answer]
        counted += [False, *[answer] * len(body), *[True] * answer]
    return np.array(ids, dtype=np.uint32), np.array(counted, dtype=bool)


class ConversationReader(FileReader):
    """Reads rows as documents that are conversations: the JSON of their messages."""

    def __init__(self, skip_bad_rows: bool, eot_token: str) -> None:
        super().__init__("text", "file", False, skip_bad_rows)
        self.eot_token = eot_token

    def _read_text(self, path: str, raw: Any) -> Iterator[Any]:
        raise UserError(f"{path}: --chat=true reads questions and answers from rows in .jsonl, .json and .csv files")

    def _parquet(self, path: str, raw: Any) -> Iterator[tuple[str, Any]]:
        return self._read_text(path, raw)

    def text_of(self, row: Any, where: str) -> str | None:
        """The messages of one row as JSON, an end token that closes an answer left away; None when it is skipped."""
        messages = messages_of(row)
        if isinstance(messages, str):
            return self._skip("rows without a conversation skipped", f"{where}: {messages}")
        for message in messages:
            text = super().text_of({"text": message["content"]}, where)
            message["content"] = text.removesuffix(self.eot_token) if message["role"] == "assistant" else text
            self.counts["end tokens written out after an answer left away"] += message["content"] != text
        return json.dumps(messages, ensure_ascii=False)


def messages_of(row: Any) -> list[dict[str, str]] | str:
    """The messages of a row in one of the known forms, or what is wrong with it."""
    if not isinstance(row, dict):
        return "it is no object with fields"
    messages = row.get("messages")
    pair = next((pair for pair in PAIRS if pair[0] in row and pair[1] in row), None)
    if messages is None and pair is None:
        known = ", ".join("/".join(pair) for pair in PAIRS)
        return f"none of {known} or messages, only {', '.join(map(repr, row)) or 'nothing'}"
    if messages is None:
        question, answer = row[pair[0]], row[pair[1]]
        if pair[0] == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
            question = f"{question}\n\n{row['input']}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        found = [{"role": message["role"], "content": message["content"]} for message in messages]
    except (TypeError, KeyError):
        return "messages is not a list of objects with role and content"
    if odd := [message for message in found if message["role"] not in ROLES or not isinstance(message["content"], str)]:
        return f"{json.dumps(odd[0], default=str)[:80]} is no message of {', '.join(ROLES)} with text"
    if not any(message["role"] == "assistant" and message["content"].strip() for message in found):
        return "it has no answer"
    return found
