# shellcheck shell=sh
# The image's variables, for shells that begin without them: login shells, whose PATH is Debian's (JupyterLab's
# terminals, ssh, bash -l, srun bash -l), and those that begin with an empty environment (su -). What is set stays.
while IFS= read -r line; do
    case $line in
        PATH=*) export "${line?}" ;;
        *) eval "[ -n \"\${${line%%=*}+set}\" ]" || export "${line?}" ;;
    esac
done </opt/image/environment
unset line
[ -z "${SSH_CONNECTION-}" ] || [ "$PWD" != "$HOME" ] || cd /workspace || :
