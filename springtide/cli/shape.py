"""Messages as plain values for `--json`: whole numbers stay numbers, enums are their short names, unknown is null."""

import json
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp


def plain(message: Message) -> Any:
    """Every field is there: an absent optional one and an absent message are None."""
    if isinstance(message, Timestamp):
        return message.ToJsonString()
    if isinstance(message, Duration):
        return message.seconds + message.nanos / 1e9
    if isinstance(message, Struct):
        return MessageToDict(message)
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return dict(value)
        return [_item(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _item(field, value)


def _item(field: Any, value: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return plain(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    return value


def enum_name(enum_type: Any, number: int) -> str:
    """`WORKER_STATE_ACTIVE` is ACTIVE; a number of a newer version is itself."""
    value = enum_type.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = str(enum_type.values[0].name).removesuffix("UNSPECIFIED")
    return str(value.name).removeprefix(prefix)


def name_of(message: Message, field: str) -> str:
    """Short name of an enum field; "" for UNSPECIFIED."""
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    name = enum_name(descriptor.enum_type, getattr(message, field))
    return "" if name == "UNSPECIFIED" else name


def dump(value: Any) -> str:
    """JSON for people and programs: two spaces, keys in the order of the contract."""
    return json.dumps(value, indent=2, ensure_ascii=False)
