"""What people read: terminal tables of hardware, plans and verdicts.

In: plans, verdicts and hardware, as the stages before made them. Out: text, never a number that is not in them.
May import every stage except the command line.
"""
