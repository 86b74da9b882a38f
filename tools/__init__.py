"""What runs beside training (pictures, paraphrases, captions), and optional parts of common.py and eval.py."""
