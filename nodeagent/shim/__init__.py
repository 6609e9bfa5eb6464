"""The process in front of one engine: starts it, is its only reachable port, counts, refuses, outlives the agent."""
