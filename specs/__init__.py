"""The YAML job spec: typed model, loader with line numbers, examples."""
