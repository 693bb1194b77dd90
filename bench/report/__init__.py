"""The report of a study: tables, figures and one HTML file, made of the three CSVs alone."""
