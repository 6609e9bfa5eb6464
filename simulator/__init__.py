"""The real control plane, routing and drain logic on a virtual clock, against modelled nodes and engines.

    arrivals -> routers (router.core) -> shims -> engines (modelled batches)
                    ^ tables, acks        ^ orders (nodeagent.core), reports
                    control plane (controlplane.core and its live view, a modelled store)

Everything follows from one seed. Nobody imports this package.
"""
