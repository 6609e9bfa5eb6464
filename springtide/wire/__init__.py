"""Messages of the protos to the model's dataclasses and back.

    pools, workers, nodes, records   types.proto
    agent                            agent.proto: hellos, heartbeats, reports, desired workers
    routing                          routing.proto: tables, deltas, loads, router reports

`x_to_proto(x)` never fails. `x_from_proto(message)` raises InvalidArgument for values that cannot be used; an enum
value that this version does not know becomes None or the harmless choice that its docstring names.
"""
