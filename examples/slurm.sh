#!/bin/bash
#SBATCH --job-name=s2s
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append

# sbatch examples/slurm.sh, from the project's folder, which all nodes must see.
#
# Slurm starts one torchrun on each node, torchrun starts 8 ranks: 2 x 8 = 16. They meet at the
# job's first node. --resume begins where there is no checkpoint yet, so a job that is requeued,
# or submitted once more, goes on from its last one. Ranks compute on CPUs and talk over gloo,
# unencrypted: only in a network that you trust.
set -euo pipefail
source .venv/bin/activate

FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One port for each job, so that two jobs on one node do not meet each other.
export MEET="$FIRST:$((20000 + SLURM_JOB_ID % 10000))"
# The network card between the nodes, where it is not the one that the host's name leads to:
# export GLOO_SOCKET_IFNAME=ib0
# Each new start gets a store of its own, without the addresses of the ranks that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 8))

# A node whose torchrun ends with an error takes the others with it; a rank that fails once is
# answered by a new start of all ranks, from the last checkpoint.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c 'exec torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 1 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$MEET" \
    --rdzv-conf "is_host=$((SLURM_NODEID == 0))" \
    -m s2s_lib train configs/field_guide.yaml --resume \
    --set data_parallel_size=2 --set global_batch=8 --set checkpoint.every=100 --steps 1000'
