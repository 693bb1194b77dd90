#!/usr/bin/env bash
# A job array by hand: one task for each library, all into one results folder.  A template to copy and change.
#
#     sbatch scripts/slurm_array.sh experiment=paper device=cuda          (from the project's folder)
#
# python -m bench.slurm submit does more: one array for each number of GPUs, tasks of equal length, requeueing at the
# time limit, rows for runs that vanish.  Take this one where you want to see all that happens.
#
#SBATCH --job-name=bench
# As many tasks as there are libraries below; %2: at most two at a time.
#SBATCH --array=0-5%2
# The cells of one task run one after the other on one node, which must have the GPUs of the largest.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
# No other job on the node: what it does would be measured too.
#SBATCH --exclusive
##SBATCH --gres=gpu:4
##SBATCH --partition=gpu
#SBATCH --time=04:00:00
# A preempted task is run again; what it has finished is skipped.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%A_%a.out
# A minute before the limit the running cell is ended and recorded as interrupted; give the command again for the rest.
#SBATCH --signal=B:TERM@60

set -euo pipefail
libraries=(single ddp torchgpipe fairscale deepspeed torch)
# module load cuda
[ ! -f .venv/bin/activate ] || source .venv/bin/activate
# exec: the process that SLURM signals must be Python, not this shell.
exec python -m bench -m "library=${libraries[$SLURM_ARRAY_TASK_ID]}" "$@"
