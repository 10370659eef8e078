"""How a run is told: console, metrics.jsonl, summary.json, TensorBoard, report.html."""
