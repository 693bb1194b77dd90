"""Models as a flat ``nn.Sequential``, and a layer table for each; importing this imports no torch."""
