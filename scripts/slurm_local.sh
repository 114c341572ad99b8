#!/usr/bin/env bash
# SLURM with one node on this machine, for trials and slow tests: scripts/slurm_local.sh start|stop
#
# Run it as root, without systemd (for example in a container). Debian packages: apt-get install slurm-wlm slurmdbd munge mariadb-server
# `start` prints the setting for other commands of a shell: eval "$(scripts/slurm_local.sh start)"
# Two partitions: `low` (default) and `high`. Jobs of `high` send jobs of `low` back to the queue. KVBENCH_SLURM_GPUS=1 claims
# a GPU that does not exist. Exit code 3 if packages are missing.
set -euo pipefail

here=${KVBENCH_SLURM_DIR:-/tmp/kvbench-slurm}
gpus=${KVBENCH_SLURM_GPUS:-0}
export SLURM_CONF=$here/slurm.conf

message() { echo "slurm_local: $*" >&2; }

needed() {
    local program missing=()
    for program in slurmctld slurmd slurmdbd munged mariadbd mariadb-install-db sbatch; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    if ((${#missing[@]})); then
        message "missing ${missing[*]}: apt-get install slurm-wlm slurmdbd munge mariadb-server"
        exit 3
    fi
    if [[ $EUID -ne 0 ]]; then
        message "must be started as root"
        exit 3
    fi
}

until_true() { # seconds, command: wait until it succeeds
    local left=$(($1 * 5))
    shift
    until "$@" >/dev/null 2>&1; do
        ((left-- > 0)) || { message "gave up waiting for: $*; see $here/*.log"; exit 1; }
        sleep 0.2
    done
}

write_configuration() {
    local host memory
    host=$(hostname -s)
    memory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024 - 512))
    cat >"$here/slurm.conf" <<CONF
ClusterName=kvbench
SlurmctldHost=$host
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool
SlurmctldPidFile=$here/slurmctld.pid
SlurmdPidFile=$here/slurmd.pid
SlurmctldLogFile=$here/slurmctld.log
SlurmdLogFile=$here/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$host
AccountingStoragePort=16819
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
KillWait=10
OverTimeLimit=0
MinJobAge=3600
InactiveLimit=0
$( ((gpus)) && echo "GresTypes=gpu")
NodeName=$host CPUs=$(nproc) RealMemory=$memory State=UNKNOWN $( ((gpus)) && echo "Gres=gpu:$gpus")
PartitionName=low Nodes=$host Default=YES MaxTime=INFINITE State=UP PriorityTier=1 OverSubscribe=FORCE:4 GraceTime=20
PartitionName=high Nodes=$host MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
    ((gpus)) && echo "NodeName=$host Name=gpu Count=$gpus File=/dev/null" >"$here/gres.conf" || rm -f "$here/gres.conf"
    cat >"$here/slurmdbd.conf" <<CONF
AuthType=auth/munge
DbdHost=$host
DbdPort=16819
SlurmUser=root
LogFile=$here/slurmdbd.log
PidFile=$here/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=16820
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
CONF
    chmod 600 "$here/slurmdbd.conf"
}

start() {
    needed
    stop
    mkdir -p "$here/state" "$here/spool" "$here/db"
    chmod 755 "$here"
    write_configuration

    dd if=/dev/urandom of="$here/munge.key" bs=1024 count=1 status=none
    chmod 400 "$here/munge.key"
    mkdir -p /run/munge # sacctmgr uses this socket and ignores AuthInfo
    chmod 755 /run/munge
    munged --force --key-file="$here/munge.key" --socket=/run/munge/munge.socket.2 --pid-file="$here/munge.pid" \
        --log-file="$here/munge.log" --seed-file="$here/munge.seed" >>"$here/munge.log" 2>&1

    mariadb-install-db --no-defaults --datadir="$here/db" --user=root --auth-root-authentication-method=normal \
        >"$here/db.log" 2>&1
    setsid mariadbd --no-defaults --datadir="$here/db" --user=root --port=16820 --bind-address=127.0.0.1 \
        --socket="$here/db.socket" --pid-file="$here/db.pid" --innodb-buffer-pool-size=64M </dev/null >>"$here/db.log" 2>&1 &
    until_true 60 mariadb --no-defaults --socket="$here/db.socket" -e "select 1"
    mariadb --no-defaults --socket="$here/db.socket" -e "
        create user slurm@127.0.0.1 identified by 'slurm';
        create user slurm@localhost identified by 'slurm';
        grant all on slurm_acct.* to slurm@127.0.0.1, slurm@localhost;"

    SLURMDBD_CONF=$here/slurmdbd.conf slurmdbd </dev/null >>"$here/slurmdbd.log" 2>&1
    until_true 60 timeout 5 sacctmgr -n show cluster
    timeout 20 sacctmgr -i add cluster kvbench >/dev/null 2>&1 || true
    slurmctld -f "$here/slurm.conf" >>"$here/slurmctld.log" 2>&1
    slurmd -f "$here/slurm.conf" >>"$here/slurmd.log" 2>&1
    until_true 60 bash -c "sinfo -h -o %T | grep -q idle"
    message "$(sinfo --version) is up in $here"
    echo "export SLURM_CONF=$here/slurm.conf"
}

end() { # pid file: end its process, in order if it can
    local pid
    [[ -s $1 ]] || return 0
    pid=$(<"$1")
    kill "$pid" 2>/dev/null || return 0
    for _ in $(seq 50); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.2
    done
    kill -9 "$pid" 2>/dev/null || true
}

stop() {
    local name
    for name in slurmd slurmctld slurmdbd db munge; do
        end "$here/$name.pid"
    done
    rm -rf "$here"
}

case ${1:-} in
    start) start ;;
    stop) stop ;;
    *) message "usage: scripts/slurm_local.sh start|stop"; exit 2 ;;
esac
