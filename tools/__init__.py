"""What runs beside training: pictures, paraphrases."""
