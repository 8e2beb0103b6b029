#!/usr/bin/env bash
# Train on several nodes under Slurm, one task a node, one rank a GPU:
#
#   sbatch --nodes 8 --gpus-per-node 8 launch/slurm.sh --optimizer.lr=1e-4
#   CONFIG_FILE=my.toml sbatch --nodes 8 --gpus-per-node 8 launch/slurm.sh
#
# The repository and VENV must be on a file system that all nodes share. Run ./run_train.sh --help once on the login
# node, so that the environment exists before the nodes need it.
#SBATCH --job-name=torchtitan-cp
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --output=%x-%j.log
# 300 s before the time limit, or when the job is preempted, the run finishes its step, saves and ends with exit code 0.
# Submit the same command again to resume. A step and a save must fit into 300 s.
#SBATCH --signal=USR1@300
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?start this with sbatch, from the folder of the repository}"
export NNODES="$SLURM_JOB_NUM_NODES"
first_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
# Each job has its own port, since two jobs may share a node.
export RDZV_ENDPOINT="${RDZV_ENDPOINT:-$first_node:$((20000 + SLURM_JOB_ID % 10000))}"
# srun does not take the processors of a task from sbatch.
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --kill-on-bad-exit=1 ./run_train.sh "$@"
