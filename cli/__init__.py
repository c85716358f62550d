"""The commands a person types, and what they see."""
