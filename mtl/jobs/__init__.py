"""Many runs, shared among workers that see one disk. Who works on a run holds the lock beside its folder.

The kernel frees the lock of a process that ends, however it ended, so that a killed worker's run goes on at once.
"""
