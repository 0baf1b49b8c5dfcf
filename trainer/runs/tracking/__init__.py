"""Trackers (wandb, mlflow, those of other packages), which one thread of rank 0 calls.

The training puts records into a bounded queue without waiting (`feed`). W&B uploads from a program of its
own, and the requests of MLflow's client have short bounds, so the thread mostly sleeps.
"""
