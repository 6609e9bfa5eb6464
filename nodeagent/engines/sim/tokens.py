"""What the simulated engine answers: token i is a function of the prompt and i alone (pure functions, usable in tests).

Vocabulary (ids below 2**27, so that they fit uint32 fields and JSON):

- 1, 2: begin and end of text; they decode to nothing.
- `(length << 24) | bytes`, length 1..3: a piece of up to three UTF-8 bytes. `encode(text)` cuts text into such pieces.
- `ANSWER_BASE + value`, value below 2**20: the word `w<value as 5 hex digits> `. Only answers consist of these.

Continuation: a prompt given as ids that is *prompt ids + the first k ids of that prompt's answer* continues with id k
of the same answer. Any other use of answer ids (one lost, doubled, out of order, or re-tokenised from text) makes a new
prompt with another answer, so that an inexact continuation always shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

BOS_ID = 1
EOS_ID = 2
ANSWER_BASE = 0x0400_0000
ANSWER_BITS = 20
PIECE_BYTES = 3
_WORDS_PER_DIGEST = 16
_ANSWER_END = ANSWER_BASE + (1 << ANSWER_BITS)

Prompt = str | Sequence[int]


class UnknownTokenId(ValueError):
    """A prompt holds an id that is not in the vocabulary; `.token_id` names it."""

    def __init__(self, token_id: int) -> None:
        super().__init__(f"token id {token_id} is out of vocabulary")
        self.token_id = token_id


def count_tokens(text: str) -> int:
    """How many prompt tokens `encode(text)` has, without building them."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // PIECE_BYTES)


def encode(text: str) -> list[int]:
    """The ids of a prompt text: one for each three UTF-8 bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    pieces = (raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES))
    return [(len(piece) << 24) | int.from_bytes(piece, "big") for piece in pieces]


def is_answer_id(token_id: int) -> bool:
    """True for the ids that answers consist of."""
    return ANSWER_BASE <= token_id < _ANSWER_END


def token_bytes(token_id: int) -> bytes:
    """The bytes of one id; UnknownTokenId when it is not in the vocabulary."""
    if is_answer_id(token_id):
        return b"w%05x " % (token_id - ANSWER_BASE)
    if token_id in (BOS_ID, EOS_ID):
        return b""
    length = token_id >> 24
    if not 1 <= length <= PIECE_BYTES or (token_id & 0xFF_FFFF) >> (8 * length):
        raise UnknownTokenId(token_id)
    return (token_id & 0xFF_FFFF).to_bytes(PIECE_BYTES, "big")[PIECE_BYTES - length :]


def decode(token_ids: Iterable[int]) -> str:
    """The text of ids: `decode(encode(text)) == text`, and answers decode to their words."""
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")


def render_chat(messages: Iterable[Mapping[str, object]]) -> str:
    """The prompt text of a chat: `<|role|>` line, content line, for each message, then an open `<|assistant|>` line.

    Content is a string or a list of parts, of which the `text` ones count.
    """
    lines: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        lines.append(f"<|{message.get('role', '')}|>\n{'' if content is None else content}\n")
    lines.append("<|assistant|>\n")
    return "".join(lines)


class Answer:
    """The answer to one prompt: an endless row of tokens, of which the server takes as many as were asked for.

    `offset` is the number of answer tokens that the prompt already held (a continuation); indexes are relative to it.
    """

    __slots__ = ("_block", "_values", "offset", "prompt_tokens", "root")

    def __init__(self, prompt: Prompt) -> None:
        self.offset = 0
        self._block = -1
        self._values: tuple[int, ...] = ()
        if isinstance(prompt, str):
            self.prompt_tokens = count_tokens(prompt)
            self.root = _root(prompt.encode("utf-8", "surrogatepass"))
            return
        self.prompt_tokens = len(prompt)
        first = next((at for at, token_id in enumerate(prompt) if is_answer_id(token_id)), len(prompt))
        self.root = _root(b"".join(map(token_bytes, prompt[:first])))
        produced = list(prompt[first:])
        if produced == self.ids(0, len(produced)):
            self.offset = len(produced)
        else:
            self.root = _root(b"".join(map(token_bytes, prompt)))
            self._block = -1

    def ids(self, start: int, stop: int) -> list[int]:
        """Ids start..stop-1 of what follows the prompt."""
        return [ANSWER_BASE + self._value(at) for at in range(start + self.offset, stop + self.offset)]

    def words(self, start: int, stop: int) -> list[str]:
        """The same tokens as text, each with its closing space."""
        return [f"w{self._value(at):05x} " for at in range(start + self.offset, stop + self.offset)]

    def _value(self, at: int) -> int:
        block, slot = divmod(at, _WORDS_PER_DIGEST)
        if block != self._block:
            digest = blake2b(self.root + block.to_bytes(8, "big")).digest()
            mask = (1 << ANSWER_BITS) - 1
            self._values = tuple(
                int.from_bytes(digest[4 * word : 4 * word + 4], "big") & mask for word in range(_WORDS_PER_DIGEST)
            )
            self._block = block
        return self._values[slot]


def answer_ids(prompt: Prompt, n: int, start: int = 0) -> list[int]:
    """The ids of tokens start..start+n-1 that the simulated engine answers to this prompt (text, or ids)."""
    return Answer(prompt).ids(start, start + n)


def answer_tokens(prompt: Prompt, n: int, start: int = 0) -> list[str]:
    """The same as words; a chat's prompt is `render_chat(messages)`."""
    return Answer(prompt).words(start, start + n)


def answer_text(prompt: Prompt, n: int, start: int = 0) -> str:
    """The same as one text, as a non-streamed answer holds it."""
    return "".join(answer_tokens(prompt, n, start))


def _root(prompt: bytes) -> bytes:
    return blake2b(prompt, digest_size=16).digest()
