"""Do all ranks do the same, with the same data?"""
