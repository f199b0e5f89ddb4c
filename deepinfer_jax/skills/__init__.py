"""Skills of the nano model: a deterministic generator of conversations and the suite that grades
them.
"""
