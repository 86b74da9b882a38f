"""What runs beside training, and parts of common.py that not every run needs (common.ROOMS, common.open_room)."""
