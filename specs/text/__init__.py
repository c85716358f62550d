"""From the text of a spec to values with positions, before any meaning is given to them."""
