"""Processes that a launcher keeps beside its workers for the storage side, and the room that they need."""
