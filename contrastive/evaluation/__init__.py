"""Evaluation of a split: from its images, captions, classes and questions to numbers.

measure.py     the tasks of a split, one after another; Evaluator, all sets of a run
embed.py       embeddings of all images and texts, shared among the processes
retrieval.py   tasks by caption: retrieval, multi-instance retrieval, the modality gap
rerank.py      retrieval that VAST's matching head ranks anew
by_class.py    tasks by class: neighbours, probes, zero-shot
answers.py     questions and their answers (MAMA)
pieces.py      what an evaluation returns; saved_pieces.py: what is saved of it for pictures
report.py      the result as a table

contrastive/core/metrics.py has the pure metrics.
"""
