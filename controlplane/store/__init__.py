"""Where records, decisions and events are kept. `store.py` says what every store does; the rest are stores."""
