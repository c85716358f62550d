"""Which rank holds, and which stores, which part of every tensor."""
