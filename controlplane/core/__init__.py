"""Pure decisions of the control plane: no I/O, no clock, no randomness, no logging, no protobuf."""
