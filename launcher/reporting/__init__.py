"""Reports of a run: console, metrics.jsonl, summary.json, TensorBoard, report.html."""
