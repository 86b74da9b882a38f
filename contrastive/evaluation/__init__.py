"""Evaluation of a data set: ranks, classes, relevancies and answers. metrics.py has the pure functions."""
