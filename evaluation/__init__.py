"""Evaluation of a data set: ranks, classes, relevancies, answers; metrics.py holds the numbers alone."""
