"""The records of Springtide as frozen dataclasses: no I/O, no protobuf. Times are seconds since the epoch."""
