"""Answers in OpenAI's shapes as vLLM writes them: events of a stream, whole bodies, errors. No I/O here."""

import orjson

from nodeagent.engines.sim.openai import WORD_CHARS, ApiError, Generation

DONE = b"data: [DONE]\n\n"


class Writer:
    """Writes one generation's answer: events of a stream, or the one body. A token costs a join of bytes."""

    __slots__ = ("_created", "_generation", "_head", "_middle", "_tail")

    def __init__(self, generation: Generation, created: int) -> None:
        self._generation = generation
        self._created = created
        kind = "chat.completion.chunk" if generation.chat else "text_completion"
        head = {"id": generation.request_id, "object": kind, "created": created, "model": generation.model}
        field = b'"delta":{"content":"' if generation.chat else b'"text":"'
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":0,' + field
        self._middle = (b'"}' if generation.chat else b'"') + b',"logprobs":null,"finish_reason":'
        self._tail = b"}]" if generation.chat else b',"stop_reason":null}]'

    def opening(self) -> bytes:
        """What comes before the first token: the role of a chat, and the prompt's ids when asked for."""
        generation = self._generation
        if not generation.chat:
            return b""
        event: dict[str, object] = {
            "id": generation.request_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": generation.model,
            "choices": [
                {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            ],
        }
        if generation.token_ids:
            event["prompt_token_ids"] = generation.prompt_ids()
        return b"data: " + orjson.dumps(event) + b"\n\n"

    def tokens(self, start: int, stop: int) -> bytes:
        """Events of tokens start..stop-1; the last one of the answer names the finish reason."""
        generation = self._generation
        plain = not generation.token_ids and not generation.usage_each
        parts: list[bytes] = []
        words = generation.answer.words(start, stop)
        whole = stop * WORD_CHARS <= generation.clip
        for at, word in enumerate(words, start):
            if plain and whole and at + 1 < generation.wanted:
                parts += (self._head, word.encode(), self._middle, b"null", self._tail, b"}\n\n")
            else:
                text = word[: max(0, generation.clip - WORD_CHARS * at)]
                last = at + 1 == generation.wanted
                parts.append(self._event(text, at, generation.finish_reason if last else None))
        return b"".join(parts)

    def aborted(self, produced: int) -> bytes:
        """The last event of an aborted stream."""
        return self._event("", produced, "abort")

    def closing(self, produced: int) -> bytes:
        """What comes after the last token: usage when asked for, and the end mark."""
        generation = self._generation
        if not generation.usage:
            return DONE
        event: dict[str, object] = {
            "id": generation.request_id,
            "object": "chat.completion.chunk" if generation.chat else "text_completion",
            "created": self._created,
            "model": generation.model,
            "choices": [],
            "usage": self._usage(produced),
        }
        return b"data: " + orjson.dumps(event) + b"\n\n" + DONE

    def body(self, produced: int, finish_reason: str) -> dict[str, object]:
        """The whole answer of a request that is not streamed."""
        generation = self._generation
        text = generation.text(0, produced)
        choice: dict[str, object] = {"index": 0}
        if generation.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        stop_reason = generation.stop_reason if finish_reason == "stop" else None
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}
        answer: dict[str, object] = {
            "id": generation.request_id,
            "object": "chat.completion" if generation.chat else "text_completion",
            "created": self._created,
            "model": generation.model,
            "choices": [choice],
            "usage": self._usage(produced),
        }
        if generation.token_ids:
            choice["token_ids"] = generation.answer.ids(0, produced)
            (answer if generation.chat else choice)["prompt_token_ids"] = generation.prompt_ids()
        return answer

    def _event(self, text: str, at: int, finish_reason: str | None) -> bytes:
        generation = self._generation
        reason = b"null" if finish_reason is None else orjson.dumps(finish_reason)
        extra = b""
        if finish_reason is not None or not generation.chat:
            extra += b',"stop_reason":' + orjson.dumps(generation.stop_reason if finish_reason == "stop" else None)
        if generation.token_ids:
            ids = [] if finish_reason == "abort" else generation.answer.ids(at, at + 1)
            extra += b',"token_ids":' + orjson.dumps(ids)
            if at == 0 and not generation.chat:
                extra += b',"prompt_token_ids":' + orjson.dumps(generation.prompt_ids())
        usage = b',"usage":' + orjson.dumps(self._usage(at + 1)) if generation.usage_each else b""
        return b"".join((self._head, text.encode(), self._middle, reason, extra, b"}]", usage, b"}\n\n"))

    def _usage(self, produced: int) -> dict[str, int]:
        prompt = self._generation.answer.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": produced, "total_tokens": prompt + produced}


def error_event(error: ApiError) -> bytes:
    """An error in the middle of a stream, then the end mark: what vLLM sends when its engine dies."""
    return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE
