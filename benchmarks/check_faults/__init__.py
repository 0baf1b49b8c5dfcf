"""Known faults, put into the trainer one at a time: which does `trainer check` see?"""
