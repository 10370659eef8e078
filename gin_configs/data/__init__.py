"""Data that recipes of gin_configs/ are shown with: sources of text that they import as they would import yours."""
