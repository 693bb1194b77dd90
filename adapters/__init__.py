"""One thin file a library; importing this package imports no library."""
