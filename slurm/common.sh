# What the scripts of this folder share. They source it from the repository's root.

# --- for your cluster: edit here, and account, partition, GPUs and time in the scripts' #SBATCH lines --------------
# module load cuda/12.4
python=${PYTHON:-.venv/bin/python}
max_crashes=3 # at the same checkpoint; then the job ends as failed
max_starts=20 # from the same checkpoint, whatever ended them
# -------------------------------------------------------------------------------------------------------------------

say() { printf '%s slurm: %s\n' "$(date '+%F %T')" "$*"; }
fail() { say "$*" >&2; exit 2; }

# train RECIPE [arguments of the script]: inside a job train until it is done; outside, check and submit.
train() {
  parse "$@"
  if [ -z "${SLURM_JOB_ID:-}" ]; then submit; fi
  listen USR1
  count_ranks
  check $((nodes * tasks)) "$tasks"
  dir=$(sed -n 's/^# writes to: //p' <<< "$plan")
  num_steps=$(sed -n 's/^  num_steps: //p' <<< "$plan")
  starts=slurm-${SLURM_JOB_NAME//\//-}-$SLURM_JOB_ID.starts # the checkpoint at each start of this job
  newest=$(newest_step)
  announce "$nodes x $tasks ranks" "-m mdlm_scale.train --config $config ${overrides[*]}" \
    "$dir, from $newest of $num_steps steps" "it saves first; the same sbatch command goes on from there"
  note_start
  local ours=(-m mdlm_scale.train --config "$config" "${overrides[@]}")
  if [ -n "$torchrun" ]; then
    export -f torchrun_node
    on_every_node 1 bash -c 'torchrun_node "$@"' _ "$python" "$tasks" "${ours[@]}"
  else
    on_every_node "$tasks" "$python" "${ours[@]}"
  fi
  if [ "$code" = 2 ]; then
    rm "$starts"
    fail "not started again: that would end in the same way (see above). Mend what is wrong, then sbatch again."
  fi
  if finished; then
    rm "$starts"
    say "done: $(newest_step) in $dir"
    exit 0
  fi
  case $code in 85 | 143) ;; *) echo "$newest crashed" >> "$starts" ;; esac # else it was stopped
  requeue "srun ended with $code at $(newest_step) of $num_steps"
}

# Give up if too many starts from the same checkpoint brought nothing.
note_start() {
  echo "$newest" >> "$starts" ||
    fail "cannot write $PWD/$starts, without which a job that crashes would start for ever: make room there"
  local begun crashed
  begun=$(grep -cx "$newest" "$starts") crashed=$(grep -cx "$newest crashed" "$starts")
  if [ "$crashed" -ge "$max_crashes" ] || [ "$begun" -gt "$max_starts" ]; then
    rm "$starts"
    say "gives up: $((begun - 1)) starts from $newest brought no new checkpoint, $crashed of them crashed. See above why;" \
      "then sbatch again." >&2
    exit 1
  fi
}

# evaluate OPTIONS...: mdlm_scale.evaluate with these on every GPU of the job. Interrupted it starts anew.
evaluate() {
  [ -n "${SLURM_JOB_ID:-}" ] || fail "submit this: sbatch $0. Without Slurm: $python -m mdlm_scale.evaluate $*"
  needs_python
  listen TERM
  count_ranks
  announce "$nodes x $tasks ranks" "-m mdlm_scale.evaluate $*" "$(value_of --json "$@")" "nothing is left of it"
  on_every_node "$tasks" "$python" -m mdlm_scale.evaluate "$@"
  end_or_start_anew
}

# The arguments of a training script: its own, overrides of the config, and what is left for sbatch.
parse() {
  config=$1 torchrun="" overrides=() for_sbatch=()
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      --config) config=${2:?--config needs a file}; shift ;;
      --torchrun) torchrun=yes ;;
      -*) for_sbatch+=("$1") ;;
      *=*) overrides+=("$1") ;;
      *) for_sbatch+=("$1") ;; # the value of an option
    esac
    shift
  done
  [ -z "${SLURM_JOB_ID:-}" ] || [ ${#for_sbatch[@]} = 0 ] ||
    fail "'${for_sbatch[*]}' is no argument of the script, which are [--config FILE] [--torchrun] [section.key=value ...];" \
      "options of sbatch stand before the script's name"
  needs_python
}

needs_python() {
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || fail "the tasks of a job array would all do the same: submit without --array"
  command -v "$python" > /dev/null || fail "there is no $python here ($PWD): install first, bash tools/install.sh"
}

# prepare OPTIONS...: tools/prepare_data.py with these. It leaves nothing half-written, so interrupted it starts anew.
prepare() {
  [ -n "${SLURM_JOB_ID:-}" ] || fail "submit this: sbatch $0. Without Slurm: $python tools/prepare_data.py $*"
  needs_python
  listen TERM
  announce "one task" "tools/prepare_data.py $*" "$(value_of --output "$@")" "nothing is left of it"
  supervise srun --export=ALL --nodes=1 --ntasks=1 --cpus-per-task="$(num_cpus)" "$python" tools/prepare_data.py "$@"
  end_or_start_anew
}

# announce RANKS ARGUMENTS WRITES STOPPED: what this job is, and how it is watched and stopped.
announce() {
  local output
  output=$(known | sed -n 's/^ *StdOut=//p')
  say "job $SLURM_JOB_ID, start $((${restarts:-0} + 1)), $1 on $SLURM_JOB_NODELIST
  runs    $python $2
  writes  $3
  watch   ${output:+tail -f }${output:-here}
  stop    scancel $SLURM_JOB_ID      ($4)"
}

# value_of OPTION ARGUMENTS...: what the last such option is given; else that there is none.
value_of() {
  local option=$1 value="this log alone" before=""
  shift
  for each in "$@"; do
    [ "$before" != "$option" ] || value=$each
    [[ $each != "$option="* ]] || value=${each#*=}
    before=$each
  done
  echo "$value"
}

end_or_start_anew() {
  case $code in 130 | 143) requeue "interrupted" ;; esac # not 137: memory that is too small stays so
  exit "$code"
}

# check RANKS RANKS_PER_NODE: config, layout, data and tokenizer, as if that many ranks had been started.
check() {
  plan=$(LOCAL_WORLD_SIZE=$2 "$python" -m mdlm_scale.train --config "$config" --check --ranks "$1" "${overrides[@]}") ||
    { code=$?; say "not started: $1 ranks, $2 a node, with $config ${overrides[*]}: see above" >&2; exit "$code"; }
}

# On the login node: check for every number of nodes asked for, then submit this script.
submit() {
  local tasks count
  tasks=$(option gpus-per-node)
  count=$(option nodes N)
  case " ${for_sbatch[*]}" in
    *" --gres"* | *" -G"* | *" --gpus="* | *" --gpus "*)
      fail "this check knows --gpus-per-node alone, not --gres, --gpus and -G: use it, or submit with sbatch itself" ;;
  esac
  [[ $count =~ ^[0-9]+(-[0-9]+)?$ ]] ||
    fail "--nodes=$count: this check knows N and N-M alone: use these, or submit with sbatch itself"
  for nodes in $(seq "${count%-*}" "${count#*-}"); do check $((nodes * ${tasks##*:})) "${tasks##*:}"; done
  say "fits: $count nodes x $tasks GPUs, writes to $(sed -n 's/^# writes to: //p' <<< "$plan")"
  command -v sbatch > /dev/null || fail "there is no sbatch here: checked, not submitted"
  exec sbatch "${for_sbatch[@]}" "$0" --config "$config" ${torchrun:+--torchrun} "${overrides[@]}"
}

# option NAME [LETTER]: what sbatch will take for it, from the command line or the script's own #SBATCH line.
option() {
  local value before=""
  value=$(sed -n "s/^#SBATCH --$1=\([^ ]*\).*/\1/p" "$0")
  for each in "${for_sbatch[@]}"; do
    case $before in "--$1" | "-${2:-none}") value=$each ;; esac
    case $each in
      --$1=*) value=${each#*=} ;;
      -"${2:-none}"?*) value=${each#-?} ;;
    esac
    before=$each
  done
  echo "${value:-1}"
}

# One rank for each GPU; where a job has none, as many as it asked for. salloc tells only what it was asked for.
count_ranks() {
  local gpus=${SLURM_GPUS_PER_NODE:-}
  gpus=${SLURM_GPUS_ON_NODE:-${gpus##*:}}
  nodes=$SLURM_JOB_NUM_NODES tasks=${gpus:-${SLURM_NTASKS_PER_NODE:-1}}
}

# Cores of this node.
num_cpus() { echo "${SLURM_CPUS_ON_NODE:-${SLURM_JOB_CPUS_PER_NODE%%[(,]*}}"; }

# on_every_node TASKS COMMAND...: start so many of it on each node, sharing its cores, and tell them where rank 0 is.
on_every_node() {
  local each=$1 cpus=$(($(num_cpus) / $1))
  shift
  export MASTER_ADDR MASTER_PORT
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) # the node of this script, and of rank 0
  MASTER_PORT=$(free_port)
  unset SLURM_CPUS_PER_GPU # it contradicts what srun is told here
  unset "${!SLURM_CPU_BIND@}" # of the job, if any, from inside of which this one was submitted
  # ranks end each other; srun only helps if one does not, which it sees half a minute after the first has gone
  supervise srun --export=ALL --nodes="$nodes" --ntasks="$((nodes * each))" --ntasks-per-node="$each" \
    --distribution=block --cpus-per-task="$((cpus ? cpus : 1))" --kill-on-bad-exit=0 --wait=30 "$@"
}

# listen SIGNAL: from now on what asks this job to stop is passed on to the child as SIGNAL, and time is counted.
listen() {
  child="" asked=""
  passed_on=$1
  trap 'heard TERM' TERM
  trap 'heard USR1' USR1
  restarts=$(known | field Restarts) # not SLURM_RESTART_COUNT, which may be another job's
}

# What the controller knows of this job; nothing if it is away.
known() { scontrol show job "$SLURM_JOB_ID" 2> /dev/null; }
field() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p"; }

heard() {
  [ -n "$asked" ] || say "$1: stopping"
  asked=${asked:-$SECONDS}
  [ -z "$child" ] || kill "-$passed_on" "$child" 2> /dev/null || true
}

# supervise COMMAND...: run it to its end; its exit code is left in `code`.
supervise() {
  code=85
  [ -z "$asked" ] || return 0 # before it began
  "$@" &
  child=$!
  while true; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2> /dev/null || break # otherwise a signal ended the wait
  done
}

# requeue WHY: start this job again, unless Slurm is ending it already: by scancel, or to start it again by itself.
requeue() {
  local now="" state="" count="" reason=""
  say "$1${asked:+, $((SECONDS - asked)) s after the signal}"
  for _ in $(seq 60); do # the controller may be away for minutes
    now=$(known)
    state=$(field JobState <<< "$now") count=$(field Restarts <<< "$now") reason=$(field Reason <<< "$now")
    if [ "$(field BatchFlag <<< "$now")" = 0 ]; then
      say "no batch job, so it is not started again; the same command goes on"
      exit 85
    fi
    if [ "${count:-$restarts}" != "${restarts:-$count}" ]; then # this node was cut off, and is back
      say "Slurm has started this job again already"
      exit 85
    fi
    if [ "$state" = COMPLETING ] && [ "$reason" != TimeLimit ]; then
      say "Slurm ends this job, and starts it again unless that was by scancel"
      exit 85
    fi
    if [ "$state" = COMPLETING ] && [ -z "${starts:-}" ]; then # Slurm would not start it again
      fail "not started again: it needs more time than its limit, sbatch --time=..."
    fi
    if [ "$state" = RUNNING ] || [ "$state" = COMPLETING ]; then
      if scontrol requeue "$SLURM_JOB_ID"; then
        [ "$state$code" != COMPLETING143 ] || echo "$newest crashed" >> "$starts" # with nothing saved: not for ever
        say "to be started again"
        exit 85
      fi
    fi
    sleep 5
  done
  say "could not be requeued (state ${state:-unknown}): the same sbatch command goes on" >&2
  exit 85
}

finished() {
  local step
  step=$(sed -n 's/.*"step": \([0-9]*\).*/\1/p' "$dir/done" 2> /dev/null)
  [ "${step:-0}" -ge "$num_steps" ]
}

newest_step() {
  local found
  found=$(find "$dir/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null | sed -n 's/.*\/\(step-[0-9]*\)$/\1/p' | sort -V)
  found=${found##*$'\n'}
  echo "${found:-the beginning}"
}

# A port of this node that nothing listens on, below those that the system hands out.
free_port() {
  "$python" - "$SLURM_JOB_ID" << 'PYTHON'
import socket, sys
for port in (20000 + (int(sys.argv[1]) * 7 + n) % 10000 for n in range(10000)):
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            continue
    print(port)
    break
PYTHON
}

# torchrun_node PYTHON RANKS ARGUMENTS...: torchrun on each node. It would die of USR1, and gives its ranks 30 s after a
# TERM; so both signals go to the ranks themselves, as USR1.
torchrun_node() {
  local python=$1 tasks=$2
  shift 2
  (trap '' USR1; exec "$python" -m torch.distributed.run --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \
    --nproc-per-node="$tasks" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --shutdown-timeout=110 "$@") &
  local agent=$! code
  trap 'pkill -USR1 -P $agent' USR1 TERM
  while true; do
    code=0
    wait "$agent" || code=$?
    kill -0 "$agent" 2> /dev/null || return "$code"
  done
}
