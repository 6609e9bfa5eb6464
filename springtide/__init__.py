"""What every process of Springtide shares: the contract, the model, errors, telemetry, the data plane."""

__version__ = "0.1.0"
