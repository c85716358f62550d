"""The workers of one attempt on this node: forked, watched, judged, ended. Nothing of other nodes."""
