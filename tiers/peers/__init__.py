"""The peer tier's process, and the connections on which it sends."""
