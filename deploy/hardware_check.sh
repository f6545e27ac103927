#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks Moonpool on RDMA hardware and writes one report. `hardware_check.sh --help` and docs/hardware_check.md teach it.
set -euo pipefail

readonly usage="\
Checks Moonpool on RDMA hardware: what the hosts have, every byte of transfers of awkward sizes, rates beside perftest,
and a rail that goes down under traffic. Writes one report.

Two hosts:
  there\$ hardware_check.sh target --listen 0.0.0.0:7800 --secret @FILE
  here\$  hardware_check.sh run THERE:7800 --secret @FILE [--devices mlx5_0,mlx5_1] --report report.md

One host with two ports and a cable between them, or a switch:
  here\$  hardware_check.sh local --devices mlx5_0 --target-devices mlx5_1 --report report.md

Options of run and local:
  --devices NAME[,NAME...]         of this side: NAME, NAME:PORT or NAME:PORT@GID_INDEX. Default: every active port.
                                   The first one is compared with perftest, and is the one that is taken down.
  --target-devices NAME[,NAME...]  of the other side.
  --report FILE.md                 where the report goes; the same as JSON goes to FILE.json.
                                   Default: moonpool-hardware-report.md
  --drill auto|link|manual|skip    how the rail is taken down.
      auto    as root by \`ip link set\`, unless that might cut this host off; otherwise it asks whether somebody does
              it by hand, or is skipped where there is nobody to ask (default)
      link    as root by \`ip link set\`
      manual  it says when, somebody does it, and it waits for minutes
      skip    not at all
  --steps NAME[,NAME...]           only some of correctness, sweep and drill.
  --quick                          two minutes instead of ten; ratios are shown and not judged.

Options of target:
  --listen ADDR:PORT               PORT, PORT+1 and PORT+2 have to be reachable from the other host.
  --limit SECONDS                  ends by itself after so long. Default: 7200. It ends when the other side is done.

Options of target and run:
  --secret TEXT|@FILE              what both sides must know; also read from MOONCAKE_BENCH_SECRET.
  --insecure                       target: listen beyond loopback without a secret. The data is not encrypted.

Only the drill needs root. MOONCAKE_BENCH is the command to use in place of mooncake-bench.
Exit status: 0 nothing failed; 1 a check failed (the report says which); 2 the command line makes no sense or a program
is missing; 3 it could not begin: no such device, or the target is not there; 130 after Ctrl-C."

refuse() {
  echo "hardware_check: $1" >&2
  exit 2
}

# ---------------------------------------------------------------- arguments

case ${1-} in
  -h | --help | help | "")
    echo "$usage"
    [[ -n ${1-} ]] || exit 2
    exit 0
    ;;
  target | run | local) mode=$1 ;;
  *) refuse "there is no \"$1\": target, run or local. Try: hardware_check.sh --help" ;;
esac
shift

target="" listen="" devices="" target_devices="" report=moonpool-hardware-report.md how=auto why="" limit=7200 quick=()
steps=correctness,sweep,drill
insecure=()

value() { # value OPTION [VALUE]: refuses an option without a value
  (($# >= 2)) && [[ -n $2 ]] || refuse "$1 needs a value"
}
belongs() { # belongs OPTION MODE...
  local option=$1 one
  shift
  for one in "$@"; do [[ $mode != "$one" ]] || return 0; done
  refuse "$option does not belong to $mode. Try: hardware_check.sh --help"
}

while (($#)); do
  case $1 in
    -h | --help) echo "$usage"; exit 0 ;;
    --devices) belongs "$1" run local; value "$@"; devices=$2; shift ;;
    --target-devices) belongs "$1" run local; value "$@"; target_devices=$2; shift ;;
    --report) belongs "$1" run local; value "$@"; report=$2; shift ;;
    --drill) belongs "$1" run local; value "$@"; how=$2; shift ;;
    --steps) belongs "$1" run local; value "$@"; steps=$2; shift ;;
    --quick) belongs "$1" run local; quick=(--quick) ;;
    --listen) belongs "$1" target; value "$@"; listen=$2; shift ;;
    --limit) belongs "$1" target; value "$@"; limit=$2; shift ;;
    --insecure) belongs "$1" target; insecure=(--insecure) ;;
    # By the environment: arguments can be seen by everybody on the host.
    --secret) belongs "$1" target run; value "$@"; export MOONCAKE_BENCH_SECRET=$2; shift ;;
    -*) refuse "there is no option $1. Try: hardware_check.sh --help" ;;
    *)
      [[ $mode == run && -z $target ]] || refuse "what is \"$1\"? Try: hardware_check.sh --help"
      target=$1
      ;;
  esac
  shift
done

case $how in auto | link | manual | skip) ;; *) refuse "--drill $how: auto, link, manual or skip" ;; esac
IFS=, read -ra wanted_steps <<<"$steps"
((${#wanted_steps[@]})) || refuse "--steps \"$steps\": correctness, sweep or drill"
for name in "${wanted_steps[@]}"; do
  case $name in correctness | sweep | drill) ;; *) refuse "--steps \"$name\": correctness, sweep or drill" ;; esac
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || refuse "--limit $limit is no number of seconds"
[[ $mode != target || -n $listen ]] || refuse "target needs --listen ADDR:PORT"
[[ $mode != run || -n $target ]] || refuse "run needs the address of the target: hardware_check.sh run HOST:PORT"
[[ $mode != local || (-n $devices && -n $target_devices) ]] ||
  refuse "local needs --devices and --target-devices, the two ends of the cable"
[[ ${report##*/} == ?*.md ]] || refuse "--report $report: a name that ends in .md; the JSON goes beside it"

read -ra bench <<<"${MOONCAKE_BENCH:-mooncake-bench}"
((${#bench[@]})) || refuse "MOONCAKE_BENCH is blank: a command, or nothing for mooncake-bench"
command -v "${bench[0]}" >/dev/null ||
  refuse "there is no ${bench[0]}. Try: pip install 'moonpool[bench]', or MOONCAKE_BENCH=/path/to/mooncake-bench"
command -v timeout >/dev/null || refuse "there is no timeout. Try: apt-get install coreutils"
if [[ $mode != target ]]; then
  for file in "$report" "${report%.md}.json"; do
    : 2>/dev/null >>"$file" || refuse "--report $report: $file cannot be written"
    [[ -s $file ]] || rm -f -- "$file" # no empty report where nothing is found
  done
fi
if [[ $how == link && $(id -u) -ne 0 ]]; then
  refuse "--drill link takes a link down, which takes root. Try: --drill manual, or --drill skip"
fi

# ---------------------------------------------------------------- processes, and what is left when it ends

work=$(mktemp -d) || refuse "there is no folder for the figures. Try: TMPDIR=/a/folder/that/can/be/written"
running="" serving="" keep=""

# shellcheck disable=SC2329  # by the trap
finish() {
  local status=$? pid netdev
  # Nothing may keep it from the link: no second Ctrl-C, no terminal that is gone.
  trap - EXIT
  trap '' INT TERM HUP PIPE
  set +e
  for pid in $running $serving; do kill "$pid" 2>/dev/null; done
  for pid in $running $serving; do wait "$pid" 2>/dev/null; done
  # A step that was killed could not do it.
  if [[ -s $work/link-is-down ]]; then
    netdev=$(<"$work/link-is-down")
    echo "hardware_check: bringing $netdev up again" >&2
    ip link set dev "$netdev" up || echo "hardware_check: COULD NOT. As root: ip link set dev $netdev up" >&2
  fi
  [[ -n $keep ]] || rm -rf "$work"
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# within SECONDS COMMAND...: runs it with a deadline, so that signals are still heard here; its status is that of `within`.
within() {
  local seconds=$1 status=0
  shift
  timeout -k 30 "$seconds" "$@" &
  running=$!
  wait "$running" || status=$?
  running=""
  return "$status"
}

if [[ $mode == target ]]; then
  status=0
  within "$limit" "${bench[@]}" hardware serve --listen "$listen" "${insecure[@]}" || status=$?
  # What timeout says, and what a program that was ended says.
  case $status in 124 | 143 | 137) echo "hardware_check: nobody was done within $limit s" >&2; status=3 ;; esac
  exit "$status"
fi

if [[ $mode == local ]]; then
  MOONCAKE_BENCH_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
  export MOONCAKE_BENCH_SECRET
  : >"$work/target.log" # there for sed, however late the target begins
  timeout -k 30 "$limit" "${bench[@]}" hardware serve --listen 127.0.0.1:0 2>"$work/target.log" &
  serving=$!
  for ((tenths = 0; tenths < 600; tenths++)); do
    target=$(sed -n 's/.*listening on \([^ ]*\) for.*/\1/p' "$work/target.log")
    [[ -z $target ]] || break
    kill -0 "$serving" 2>/dev/null || break
    sleep 0.1
  done
  if [[ -z $target ]]; then
    cat "$work/target.log" >&2
    echo "hardware_check: the target process did not start" >&2
    exit 3
  fi
fi

# ---------------------------------------------------------------- the drill: who takes the rail down

wanted() { [[ ,$steps, == *,$1,* ]]; }

if [[ $how == auto && $(id -u) -ne 0 ]]; then
  how=skip why="taking a link down takes root. Run it as root, or with --drill manual"
  if [[ -t 0 && -t 1 ]] && wanted drill; then
    answer=""
    read -rt 60 -p "Not root: will somebody take the rail down by hand when asked to? [y/N] " answer || echo
    [[ $answer != [yY]* ]] || how=manual why=""
  fi
elif [[ $how == skip ]]; then
  why="--drill skip"
fi

# ---------------------------------------------------------------- steps

options=(--target "$target" --folder "$work" "${quick[@]}")
[[ -z $devices ]] || options+=(--devices "$devices")
[[ -z $target_devices ]] || options+=(--target-devices "$target_devices")

# step NAME SECONDS [OPTION...]: its figures are left in the folder, what it says in a log.
step() {
  local name=$1 seconds=$2 status=0 ended="" begin=$SECONDS
  shift 2
  echo "hardware_check: $name ..."
  within "$seconds" "${bench[@]}" hardware "$name" "${options[@]}" "$@" 2>"$work/$name.log" || status=$?
  case $status in
    0) ;;
    124 | 130 | 137 | 143) ended="did not end within $seconds s" ;;
    *) ended="ended with status $status" ;;
  esac
  [[ -z $ended ]] || echo "$ended" >"$work/$name.ended"
  echo "hardware_check: $name: ${ended:-done} ($((SECONDS - begin)) s)"
  cat "$work/$name.log" >&2
  return "$status"
}

step facts 180 || {
  status=$?
  echo "hardware_check: it could not begin" >&2
  ((status == 2)) || status=3
  exit "$status"
}
# Whatever fails is in the report, and the next one is made all the same.
if wanted correctness; then step correctness 600 || true; fi
if wanted sweep; then step sweep 1200 || true; fi
if wanted drill; then step drill 1500 --how "$how" --why "$why" || true; fi

status=0
within 60 "${bench[@]}" hardware report "${options[@]}" --steps "$steps" --report "$report" || status=$?
if ((status > 1)); then
  keep=yes
  echo "hardware_check: there is no report. The figures are in $work; once there is room:" >&2
  printf ' %q' "${bench[@]}" hardware report "${options[@]}" --steps "$steps" --report "$report" >&2
  echo >&2
  exit 3
fi
sed -n '/^\*\*/p; /^| .* \*\*FAIL\*\* /p' -- "$report"
echo "hardware_check: the report is in $report and ${report%.md}.json"
exit "$status"
