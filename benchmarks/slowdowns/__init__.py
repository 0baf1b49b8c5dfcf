"""Trainings that are slowed in known ways: do they say what slows them?"""
