"""How a conversation with tools becomes one text, and where a tool call ends in what the model writes.

`Harmony` is gpt-oss's own format; `Hermes` is ChatML with <tool_call> blocks, as Qwen and many others were trained.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Tool:
    """What the model is told of a tool. `parameters`: name to description, all of them texts."""

    name: str
    description: str
    parameters: dict[str, str]


@dataclass(frozen=True)
class ToolCall:
    """What the model asks for. `problem`: why it cannot be done; it is told to the model."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


class Format(Protocol):
    """One way of writing conversations."""

    @property
    def stops(self) -> Sequence[str]:
        """Generation stops at these; the engine leaves them out of the text."""

    def begin(self, system: str, tools: Sequence[Tool], question: str) -> str:
        """The prompt up to where the model goes on."""

    def call(self, text: str, stop: str) -> ToolCall | None:
        """The tool call that the text ends with; None: it is an answer. `stop`: what stopped it, "" for the end."""

    def after_call(self, text: str, call: ToolCall, result: str) -> str:
        """What is appended to the prompt: the model's own text, the tool's result, and the model's next turn."""

    def answer(self, text: str) -> str:
        """The final answer within the model's last text."""


class Harmony:
    """<|start|>role<|channel|>name<|message|>text<|end|>; a tool call ends in <|call|>, an answer in <|return|>."""

    stops = ("<|call|>", "<|return|>")

    def __init__(self, effort: str = "medium") -> None:
        self._effort = effort

    def begin(self, system: str, tools: Sequence[Tool], question: str) -> str:
        about = (
            f"Reasoning: {self._effort}\n\n# Valid channels: analysis, commentary, final. Channel must be included for "
            "every message.\nCalls to these tools must go to the commentary channel: 'functions'."
        )
        listed = "\n\n".join(_typescript(tool) for tool in tools)
        developer = f"# Instructions\n\n{system}\n\n# Tools\n\n## functions\n\nnamespace functions {{\n\n{listed}\n\n}}"
        return (
            f"<|start|>system<|message|>{about}<|end|>"
            f"<|start|>developer<|message|>{developer}<|end|>"
            f"<|start|>user<|message|>{question}<|end|>"
            "<|start|>assistant"
        )

    def call(self, text: str, stop: str) -> ToolCall | None:
        last = text.rpartition("<|start|>assistant")[2]
        found = re.search(r"to=functions\.([\w.-]+)", last.partition("<|message|>")[0])
        if found is None or stop == "<|return|>":
            return None
        return _call(found.group(1), last.partition("<|message|>")[2])

    def after_call(self, text: str, call: ToolCall, result: str) -> str:
        told = f"<|start|>functions.{call.name} to=assistant<|channel|>commentary<|message|>{result}<|end|>"
        return f"{text}<|call|>{told}<|start|>assistant"

    def answer(self, text: str) -> str:
        return text.rpartition("<|message|>")[2].removesuffix("<|end|>").strip()


class Hermes:
    """<|im_start|>role text<|im_end|>; a tool call is JSON within <tool_call>."""

    stops = ("</tool_call>", "<|im_end|>")

    def begin(self, system: str, tools: Sequence[Tool], question: str) -> str:
        listed = "\n".join(json.dumps({"type": "function", "function": _json_schema(tool)}) for tool in tools)
        how = (
            f"{system}\n\n# Tools\n\nYou may call one function at a time. Signatures:\n<tools>\n{listed}\n</tools>\n\n"
            'For a call return JSON:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
        )
        return f"<|im_start|>system\n{how}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"

    def call(self, text: str, stop: str) -> ToolCall | None:
        _, opened, body = text.rpartition("<tool_call>")
        if not opened or stop == "<|im_end|>":
            return None
        asked = _object(body)
        name = asked.get("name") if asked is not None else None
        if asked is None or not isinstance(name, str):
            return ToolCall("unknown", {}, "The call is no JSON object with a name.")
        arguments = asked.get("arguments")
        return ToolCall(name, arguments if isinstance(arguments, dict) else {})

    def after_call(self, text: str, call: ToolCall, result: str) -> str:
        told = f"<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
        return f"{text}</tool_call><|im_end|>\n{told}<|im_start|>assistant\n"

    def answer(self, text: str) -> str:
        return text.rpartition("</think>")[2].strip()


FORMATS = ("harmony", "hermes")


def format_of(name: str, effort: str = "medium") -> Format:
    """One of FORMATS."""
    return Harmony(effort) if name == "harmony" else Hermes()


def _call(name: str, body: str) -> ToolCall:
    arguments = _object(body)
    if arguments is None:
        return ToolCall(name, {}, "The arguments are no JSON object.")
    return ToolCall(name, arguments)


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text.strip())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _typescript(tool: Tool) -> str:
    fields = "\n".join(f"// {about}\n{name}: string," for name, about in tool.parameters.items())
    return f"// {tool.description}\ntype {tool.name} = (_: {{\n{fields}\n}}) => any;"


def _json_schema(tool: Tool) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": about} for name, about in tool.parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": tool.name, "description": tool.description, "parameters": schema}
