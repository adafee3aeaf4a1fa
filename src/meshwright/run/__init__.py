"""Room `run` (level 7): everything together: ranks and how they end, the engine, a training run, parity.

environment   where this process stands: a rank of torchrun, a task of Slurm, or neither
launch        starts the ranks of this machine; names the one that fails
command       one clear line for every error
engine        a model under a plan: step, evaluate, save, load
set_up        before the ranks of a training run: what is refused, the text, the run's folder
training      one rank of a training run
parity        a plan's layout on a tiny clone of its model (tiny) beside one process
compare       one model trained in several ways; what came of each (outcome)
restore       a trained run as a plain model
served        a Hugging Face folder or a run as a model that can be served
serving       a server over it: listen, answer, drain, end
"""
