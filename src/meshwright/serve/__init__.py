"""Room `serve` (level 6): many requests at once through one model, over a paged key/value cache.

servable    which models can be served, and divided how
options     how large the cache, a step and the queue are
request     what is asked for (SamplingParams), and how far a sequence has come
blocks      who holds which block of the cache; which blocks hold a prefix that may be shared
scheduler   which tokens run in the next step
text        tokens as text, piece by piece; stop strings
batch       one step as numbers that travel to every rank
attention   attention over the cache; rotary positions of a ragged step
linear      products with weights laid out once for the processor
swap        keys and values of preempted sequences on the host, and when that pays
runner      one rank's part of the model, by the modules that training uses
ranks       how a step reaches the ranks that compute it
sampler     the choice of a token by a request's own parameters and seed
engine      all of it together: submit, step, generate
grammar     which tokens may come next where an answer must match a JSON schema
loop        the engine in a thread of its own, between requests and clients
template    a model's own chat template
metrics     what is counted, under the names that dashboards know
api         bodies of the OpenAI API
answering   events as answers and streams
app         the routes
workload    what a load generator asks, and when
bench       asking any OpenAI-compatible server, and what its clients see
"""
