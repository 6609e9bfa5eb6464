"""What the router decides, without I/O: table, pick, admission, retry, demand. `now` is seconds of any origin."""
