"""The node agent: one per host, runs workers (a shim and its engine) on disjoint GPU slices."""
