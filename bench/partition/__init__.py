"""Where a model is cut: rules that pick a partition, without torch."""
