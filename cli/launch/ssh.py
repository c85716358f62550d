"""`dtrain launch --to ssh`: a script that starts one launcher on each host of a file and ends when all have ended.

A signal to the local end of ssh never reaches the other one, so each node reads the names of signals from its
standard input; the end of that input, when the connection or the script is gone, counts as SIGTERM.
"""

from __future__ import annotations

import shlex

from .job import PORT, Job, quoted

HOSTFILE = "hosts"

_NODE = """\
IFS= read -r DTRAIN_TOKEN || exit 69
export DTRAIN_TOKEN
cd -- "$1" || exit 69
shift
exec 3<&0
"$@" < /dev/null 3<&- &
child=$!
(while read -r name <&3; do kill -s "$name" "$child"; done; kill -s TERM "$child") > /dev/null 2>&1 &
reader=$!
wait "$child"
code=$?
kill "$reader"
exit "$code"
"""

_SCRIPT = """\
#!/usr/bin/env bash
# @NAME@ over ssh; start it with: bash THIS_FILE [HOSTFILE]
# HOSTFILE has one host a line, [USER@]HOST; the first one is node 0, and the others must reach it by that name.
# Signals to this script (Ctrl-C, TERM, HUP, USR1) go to all nodes. It ends when all have ended, with the code of the
# first that failed.
set -u

hostfile=${1:-@HOSTFILE@}
port=@PORT@
patience=60 # seconds that the others have to end by themselves, once one has failed
node=@NODE@
command=@COMMAND@

[ -r "$hostfile" ] || { echo "there is no $hostfile: give the file with the hosts" >&2; exit 2; }
hosts=()
while read -r host _; do
    case $host in '' | '#'*) continue ;; esac
    hosts+=("$host")
done < "$hostfile"
[ "${#hosts[@]}" -gt 0 ] || { echo "$hostfile names no host" >&2; exit 2; }

folder=$(mktemp -d) || exit 69
trap 'rm -rf "$folder"' EXIT
token=${DTRAIN_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}
unset DTRAIN_TOKEN
mkfifo "$folder/ended" || exit 69
exec {ended}<> "$folder/ended"

pipes=()
for rank in "${!hosts[@]}"; do
    place="--nodes ${#hosts[@]} --node-rank $rank --rendezvous ${hosts[0]#*@}:$port"
    mkfifo "$folder/$rank" || exit 69
    (
        trap '' INT TERM HUP USR1
        for pipe in ${pipes[@]+"${pipes[@]}"}; do exec {pipe}>&-; done
        ssh -o BatchMode=yes -o ServerAliveInterval=15 -- "${hosts[$rank]}" "exec sh -c $node node $command $place" \\
            < "$folder/$rank"
        echo "$rank $?" >&"$ended"
    ) &
    exec {pipe}<> "$folder/$rank"
    pipes+=("$pipe")
    printf '%s\\n' "$token" >&"$pipe"
done

tell() {
    for pipe in "${pipes[@]}"; do printf '%s\\n' "$1" >&"$pipe"; done
}
for name in INT TERM HUP USR1; do
    # shellcheck disable=SC2064 # the name of this turn
    trap "tell $name" "$name"
done

left=${#hosts[@]} result=0 until=
while [ "$left" -gt 0 ]; do
    if read -r -t 1 -u "$ended" rank code; then
        left=$((left - 1))
        if [ "$code" -ne 0 ] && [ "$result" -eq 0 ]; then
            result=$code until=$((SECONDS + patience))
            echo "node $rank (${hosts[$rank]}) was the first to fail, with code $code" >&2
        fi
    fi
    if [ -n "$until" ] && [ "$SECONDS" -ge "$until" ]; then
        until=
        tell TERM
    fi
done
exit "$result"
"""


def script(job: Job) -> str:
    """The script, for bash 4.1 or later; sh on the nodes."""
    command = quoted([str(job.folder), *job.command(str(job.spec_path))])
    values = {
        "NAME": job.spec.name,
        "HOSTFILE": shlex.quote(job.wanted.hostfile or HOSTFILE),
        "PORT": str(job.wanted.port or PORT),
        "NODE": shlex.quote(shlex.quote(_NODE)),
        "COMMAND": shlex.quote(command),
    }
    text = _SCRIPT
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
