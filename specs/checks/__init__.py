"""What is wrong with a spec, in a person's words."""
