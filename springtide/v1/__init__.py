"""Generated from protos/springtide/v1; `make protos` writes it, nothing else does."""
