"""The vocabulary of public test suites of compilers as black-box cases, each run in three ways: `python -m tests.blackbox`."""
