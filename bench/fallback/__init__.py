"""Load client and mock engine in Python, where there is no C compiler: HTTP only, and dearer than what they measure."""
