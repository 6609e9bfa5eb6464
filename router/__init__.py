"""The router: one stable address for tokens, whatever workers are ACTIVE behind it."""
