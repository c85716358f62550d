"""Who reaches whom, and by which interface: addresses, channels, the line between launchers. Nothing of training."""
