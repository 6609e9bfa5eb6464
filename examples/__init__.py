"""Examples: programs that use Springtide and are no part of it."""
