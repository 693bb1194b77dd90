"""The harness: configs become cells, cells become records, records become tidy CSVs."""
