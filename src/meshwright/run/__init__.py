"""Room `run` (level 7): everything together: ranks and how they end, the engine, a training run, parity.

environment   where this process stands: a rank of torchrun, a task of Slurm, or neither
launch        starts the ranks of this machine; names the one that fails
command       one clear line for every error
engine        a model under a plan: step, evaluate, save, load
"""
