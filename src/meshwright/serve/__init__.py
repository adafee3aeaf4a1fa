"""Room `serve` (level 6): many requests at once through one model, over a paged key/value cache.

options     how large the cache, a step and the queue are
request     what is asked for (SamplingParams), and how far a sequence has come
blocks      who holds which block of the cache; which blocks hold a prefix that may be shared
scheduler   which tokens run in the next step
text        tokens as text, piece by piece; stop strings
"""
