"""Serving of trained models: `--mode=predict`, `--mode=export`, MODEL_DIR/model.keras, and the weights for all."""
